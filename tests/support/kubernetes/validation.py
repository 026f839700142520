"""The validation of an API server of Kubernetes 1.36, with its messages."""

from __future__ import annotations

import re

NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
MOST_RESULTS = 32


def faults_of(kind: str, body: dict) -> list[str]:
    return [*_metadata(body["metadata"]), *_OF_KIND.get(kind, lambda _body: [])(body)]


def _metadata(metadata: dict) -> list[str]:
    faults = []
    name = metadata.get("name", "")
    if not name:
        faults.append("metadata.name: Required value: name or generateName is required")
    elif not NAME.fullmatch(name) or len(name) > 253:
        faults.append(
            f'metadata.name: Invalid value: "{name}": a lowercase RFC 1123 subdomain must consist '
            "of lower case alphanumeric characters, '-' or '.'"
        )
    for value in metadata.get("labels", {}).values():
        if len(value) > 63:
            faults.append(
                f'metadata.labels: Invalid value: "{value}": must be no more than 63 bytes'
            )
        elif not LABEL_VALUE.fullmatch(value):
            faults.append(
                f'metadata.labels: Invalid value: "{value}": a valid label must be an empty string '
                "or consist of alphanumeric characters, '-', '_' or '.'"
            )
    return faults


def _claim(body: dict) -> list[str]:
    faults: list[str] = []
    devices = body.get("spec", {}).get("devices", {})
    requests, names = devices.get("requests", []), set()
    where = "spec.devices.requests"
    if len(requests) > 32:
        faults.append(f"{where}: Too many: {len(requests)}: must have at most 32 items")
    for number, request in enumerate(requests):
        at, name = f"{where}[{number}]", request.get("name", "")
        if not LABEL.fullmatch(name):
            faults.append(
                f'{at}.name: Invalid value: "{name}": a lowercase RFC 1123 label must consist of '
                "lower case alphanumeric characters or '-'"
            )
        if name in names:
            faults.append(f'{at}.name: Duplicate value: "{name}"')
        names.add(name)
        chosen = [key for key in ("exactly", "firstAvailable") if request.get(key)]
        if not chosen:
            faults.append(
                f"{at}: Required value: exactly one of `exactly` or `firstAvailable` is required"
            )
        elif len(chosen) == 2:
            faults.append(
                f"{at}: Invalid value: null: exactly one of `exactly` or `firstAvailable` is "
                "required, but multiple fields are set"
            )
        elif chosen == ["exactly"]:
            faults += _exactly(f"{at}.exactly", request["exactly"])
        else:
            if len(request["firstAvailable"]) > 8:
                faults.append(f"{at}.firstAvailable: Too many: must have at most 8 items")
            for each, sub in enumerate(request["firstAvailable"]):
                faults += _exactly(f"{at}.firstAvailable[{each}]", sub)
                names.add(f"{name}/{sub.get('name')}")
    for number, config in enumerate(devices.get("config", [])):
        for each, name in enumerate(config.get("requests", [])):
            if name not in names:
                faults.append(
                    f"spec.devices.config[{number}].requests[{each}]: Invalid value: "
                    f'"{name}": must be the name of a request in the claim or the name of a '
                    "request and a subrequest separated by '/'"
                )
    return faults


def _exactly(at: str, asked: dict) -> list[str]:
    faults = []
    if not asked.get("deviceClassName"):
        faults.append(f"{at}.deviceClassName: Required value")
    count, mode = asked.get("count"), asked.get("allocationMode", "ExactCount")
    if mode == "All" and count:
        faults.append(
            f"{at}.count: Invalid value: {count}: must not be specified when allocationMode is "
            "'All'"
        )
    if mode == "ExactCount" and count is not None and count < 0:
        faults.append(f"{at}.count: Invalid value: {count}: must be greater than zero")
    if len(asked.get("selectors", [])) > 32:
        faults.append(f"{at}.selectors: Too many: must have at most 32 items")
    for number, selector in enumerate(asked.get("selectors", [])):
        expression = selector.get("cel", {}).get("expression", "")
        if expression.count("(") != expression.count(")"):
            faults.append(
                f'{at}.selectors[{number}].cel.expression: Invalid value: "{expression}": '
                "compilation failed: ERROR: <input>: Syntax error"
            )
    return faults


def _pod(body: dict) -> list[str]:
    faults = []
    spec = body.get("spec", {})
    names = []
    for number, claim in enumerate(spec.get("resourceClaims", [])):
        names.append(claim.get("name"))
        sources = [k for k in ("resourceClaimName", "resourceClaimTemplateName") if claim.get(k)]
        if len(sources) != 1:
            faults.append(
                f"spec.resourceClaims[{number}]: Invalid value: must specify one of: "
                "`resourceClaimName`, `resourceClaimTemplateName`"
            )
    if not spec.get("containers"):
        faults.append("spec.containers: Required value")
    for number, container in enumerate(spec.get("containers", [])):
        at = f"spec.containers[{number}]"
        if not container.get("image"):
            faults.append(f"{at}.image: Required value")
        for each, claim in enumerate(container.get("resources", {}).get("claims", [])):
            if claim.get("name") not in names:
                faults.append(
                    f'{at}.resources.claims[{each}]: Not found: "{claim.get("name")}": must be one '
                    "of the names in pod.spec.resourceClaims"
                )
    return faults


_OF_KIND = {"ResourceClaim": _claim, "Pod": _pod}
