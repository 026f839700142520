"""Checks of a Kubernetes cluster, with an administrator's kubeconfig.

The settings come from a file, such as an overlay's settings.env, else from the gateway's
Deployment, else from the environment."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel, Json, ValidationError

from gateway.admin.doctor.check import Check, Level, judge
from gateway.workers.launchers.kubernetes.names import WORKER, Role, service_account
from tandem.errors import InvalidRequest, describe
from tandem.settings.cluster import ClaimPoolSettings, KubernetesSettings
from tandem.settings.gateway import settings_fault
from tandem.settings.variables import check_environment

Object: TypeAlias = dict[str, Any]

NEEDS_MINOR = 34
"""Of version 1: the first with resource.k8s.io/v1."""

RIGHTS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("", "pods"): ("create", "delete", "list", "patch", "watch"),
    ("", "pods/log"): ("get",),
    ("", "secrets"): ("create", "delete", "list", "watch"),
    ("", "services"): ("create", "delete", "list", "watch"),
    ("", "events"): ("list",),
    ("resource.k8s.io", "resourceclaims"): ("create", "delete", "list", "watch"),
    ("networking.k8s.io", "networkpolicies"): ("create", "delete", "list", "watch"),
    ("apps", "deployments"): ("get",),
}
"""The rights of the gateway's Role, by group and resource."""

_DRA = "/apis/resource.k8s.io/v1"
_NODES = "/api/v1/nodes"
_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
_ROLE = "tandem.dev/role"
_ROLES: tuple[Role, ...] = ("trainer", "sampler")
_ENFORCE = "pod-security.kubernetes.io/enforce"
_PREFIX = "TANDEM_KUBERNETES_"


class Unreadable(InvalidRequest):
    """The API server refused the question."""

    type = InvalidRequest.type


ApiCall: TypeAlias = Callable[..., Object | None]
"""Asks the API server for a path, with a body or without. Returns the JSON of the answer, or None
if there is no such object. Raises `Unreadable`."""


class ClusterChecks:
    """`instance` is the name of the gateway's Deployment. `file` holds the settings of a file."""

    def __init__(
        self, ask: ApiCall, *, namespace: str, instance: str, file: Mapping[str, str] | None = None
    ) -> None:
        self._ask = ask
        self._namespace = namespace
        self._instance = instance
        self._kubectl = f"kubectl --namespace {namespace}"
        self._deployment = ask(f"{self._in('apps/v1')}/deployments/{instance}")
        self._pod: Object = {}
        values: Mapping[str, str] = os.environ
        self._source = "of the environment"
        if self._deployment is not None:
            self._pod = self._deployment["spec"]["template"]["spec"]
            values, self._source = self._variables(), f"of the Deployment {instance}"
        if file is not None:
            values, self._source = file, "of the file"
        self._settings, self._pools = _settings_of(values)

    def run(self) -> Iterator[Check]:
        yield Check("settings", self._source)
        parts = [self._version, self._devices, self._nodes, self._namespaced, self._images]
        if self._deployment is not None:  # an overlay makes the rest together with it
            parts += [self._volume, self._accounts, self._rights, self._network]
        for part in (*parts, self._gateway):
            try:
                yield from part()
            except Unreadable as error:
                about = f"{error.message}: ask with a kubeconfig that may read it"
                yield Check(part.__name__.strip("_"), "not known", about, "absent")

    # --- The cluster --------------------------------------------------------------------------

    def _version(self) -> Iterator[Check]:
        found = self._ask("/version") or {"major": "0", "minor": "0"}
        recent = int(re.sub(r"\D.*", "", found["minor"]) or 0) >= NEEDS_MINOR
        about = "has ResourceClaims of resource.k8s.io/v1"
        upgrade = f"the gateway watches ResourceClaims: upgrade to 1.{NEEDS_MINOR} or later"
        yield judge("Kubernetes", f"{found['major']}.{found['minor']}", recent, about, upgrade)

    def _devices(self) -> Iterator[Check]:
        if not self._pools:
            about = "TANDEM_CLAIM_POOLS is empty, so no worker can be placed: name a pool"
            yield Check("pools", "none", about, "problem")
            return
        if self._ask(_DRA) is None:
            about = "the API server does not serve it: turn DynamicResourceAllocation on"
            yield Check("resource.k8s.io/v1", "absent", about, "problem")
            return
        classes = {pool.device_class for pool in self._pools}
        classes |= {each.device_class for pool in self._pools for each in pool.alternatives or ()}
        there = {each["metadata"]["name"] for each in self._list(f"{_DRA}/deviceclasses")}
        for name in sorted(classes - there - {""}):
            known = f"there are {', '.join(sorted(there))}" if there else "there is none"
            about = f"a pool names it; {known}: install the driver, or correct the pool"
            yield Check(f"DeviceClass {name}", "absent", about, "problem")
        by_node = self._by_node()
        for driver, nodes in sorted(by_node.items()):
            sizes = sorted({size for found in nodes.values() for size in found if size})
            value = ", ".join(f"{node}: {len(found)}" for node, found in sorted(nodes.items()))
            memory = f", with {' or '.join(sizes)}" if sizes else ""
            yield Check(f"driver {driver}", value, f"devices of each node{memory}")
        if not by_node:
            level: Level = "problem" if classes - {""} else "absent"
            about = "no driver publishes devices: check that its pods run on the nodes with GPUs"
            yield Check("ResourceSlices", "none", about, level)
        counts = [len(found) for nodes in by_node.values() for found in nodes.values()]
        for pool in self._pools:
            yield _pool(pool, most=max(counts, default=0))

    def _by_node(self) -> Mapping[str, Mapping[str, list[str]]]:
        """Return the memory of each device, "" if unknown, by driver and node."""
        found: dict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for spec in (each["spec"] for each in self._list(f"{_DRA}/resourceslices")):
            for device in spec.get("devices") or []:
                memory = device.get("capacity", {}).get("memory", {}).get("value", "")
                found[spec["driver"]][spec.get("nodeName", "several nodes")].append(memory)
        return found

    def _nodes(self) -> Iterator[Check]:
        if self._settings.placement == "shared":  # the templates select no role
            return
        nodes = self._list(_NODES)
        for role in sorted({role for pool in self._pools for role in pool.roles}, reverse=True):
            count = sum(n["metadata"].get("labels", {}).get(_ROLE) == role for n in nodes)
            about = f"by the label {_ROLE}, which the templates select"
            otherwise = f"label one: kubectl label node NODE {_ROLE}={role}"
            value = f"{count} of {len(nodes)}"
            yield judge(f"nodes for {role}s", value, count, about, otherwise)

    # --- The namespace ------------------------------------------------------------------------

    def _namespaced(self) -> Iterator[Check]:
        found = self._ask(f"/api/v1/namespaces/{self._namespace}")
        if found is None:
            about = "apply an overlay of k8s/, or name another one with --namespace"
            yield Check(f"namespace {self._namespace}", "absent", about, "absent")
            return
        level = found["metadata"].get("labels", {}).get(_ENFORCE, "privileged")
        label = f"kubectl label --overwrite namespace {self._namespace} {_ENFORCE}=restricted"
        about, otherwise = "all pods of Tandem pass it", f"it admits every pod: {label}"
        yield judge("Pod Security", level, level != "privileged", about, otherwise, "absent")

    def _images(self) -> Iterator[Check]:
        own = _tag(self._pod["containers"][0].get("image", "")) if self._pod else ""
        for role in _ROLES:
            name, image = f"image of {role}s", getattr(self._settings, f"{role}_image")
            if not image:
                about = f"set {_PREFIX}{role.upper()}_IMAGE; without it no {role} starts"
                yield Check(name, "not set", about, "problem")
                continue
            alike = not (own and _tag(image)) or _tag(image) == own
            otherwise = f"the gateway's has the tag {own}: use one version for all three"
            yield judge(name, image, alike, "", otherwise, "absent")

    def _volume(self) -> Iterator[Check]:
        if not (claim := self._settings.volume_claim):  # the templates have another volume
            return
        name = f"volume {claim}"
        found = self._ask(f"{self._in('v1')}/persistentvolumeclaims/{claim}")
        if found is None:
            about = "without this claim, gateway and workers have no files in common"
            yield Check(name, "absent", about, "problem")
            return
        phase, modes = found["status"].get("phase", ""), found["spec"]["accessModes"]
        value = f"{phase}, {', '.join(modes)}, {found['spec'].get('storageClassName') or 'static'}"
        if phase != "Bound":  # a class may make the volume for the first pod only
            level: Level = "absent" if phase == "Pending" else "problem"
            yield Check(name, value, f"{self._kubectl} describe pvc {claim} says why", level)
        elif "ReadWriteMany" in modes:
            yield Check(name, value, "k8s/jobs/check-volume.yaml checks it from two nodes")
        else:
            about = "enough for a cluster of one node"
            several = (
                "pods of several nodes mount it: take a class, or an export, for ReadWriteMany"
            )
            yield judge(name, value, len(self._list(_NODES)) == 1, about, several)

    def _accounts(self) -> Iterator[Check]:
        """Kubernetes makes no pod for an account that is not there."""
        for role in _ROLES:
            account = service_account(role, self._settings)
            there = self._ask(f"{self._in('v1')}/serviceaccounts/{account}") is not None
            absent = f"is absent, so no {role} starts: apply k8s/base/service-accounts.yaml"
            yield judge(f"account of {role}s", account, there, "is there", absent)

    def _rights(self) -> Iterator[Check]:
        account = self._pod.get("serviceAccountName", "default")
        refused = [
            f"{verb} {resource}"
            for (group, resource), verbs in RIGHTS.items()
            for verb in verbs
            if not self._may(account, group=group, resource=resource, verb=verb)
        ]
        about = f"it may not {', '.join(refused)}: apply k8s/base/rbac.yaml"
        value = f"{len(refused)} missing" if refused else "complete"
        yield judge(f"rights of {account}", value, not refused, "", about)

    def _may(self, account: str, *, group: str, resource: str, verb: str) -> bool:
        plural, _, subresource = resource.partition("/")
        asked = {"namespace": self._namespace, "verb": verb, "group": group, "resource": plural}
        if subresource:
            asked["subresource"] = subresource
        if plural == "deployments":
            asked["name"] = self._instance
        everybody = ["system:serviceaccounts", "system:authenticated"]
        spec = {
            "user": f"system:serviceaccount:{self._namespace}:{account}",
            "groups": [*everybody, f"system:serviceaccounts:{self._namespace}"],
            "resourceAttributes": asked,
        }
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
        answer = self._ask(_REVIEWS, review | {"spec": spec})
        return answer is not None and bool(answer["status"]["allowed"])

    def _network(self) -> Iterator[Check]:
        listed = self._list(f"{self._in('networking.k8s.io/v1')}/networkpolicies")
        # Without a trainer's own policy, which protects no other pod.
        count = sum(WORKER not in each["metadata"].get("labels", {}) for each in listed)
        about = "the network plugin decides whether they are enforced; the API does not tell"
        none = "every pod reaches the workers, which ask for a certificate and a secret"
        yield judge("network policies", f"{count}", count, about, none, "absent")

    def _gateway(self) -> Iterator[Check]:
        if self._deployment is None:
            about = f"there is no Deployment {self._instance} yet ({_PREFIX}INSTANCE)"
            yield Check("gateway", "absent", about, "absent")
            return
        ready = self._deployment.get("status", {}).get("readyReplicas", 0)
        label = f"tandem.dev/serving%3D{self._instance}"
        serving = len(self._list(f"{self._in('v1')}/pods?labelSelector={label}"))
        asked = self._deployment["spec"].get("replicas", 1)
        value = f"{ready} of {asked} ready, {serving} serving"
        logs = f"{self._kubectl} logs deployment/{self._instance} says more"
        yield judge("gateway", value, ready and serving == 1, "", logs)

    # --- Asking -------------------------------------------------------------------------------

    def _variables(self) -> dict[str, str]:
        container = self._pod["containers"][0]
        values: dict[str, str] = {}
        for source in container.get("envFrom", []):
            if name := source.get("configMapRef", {}).get("name"):
                values |= (self._ask(f"{self._in('v1')}/configmaps/{name}") or {}).get("data", {})
        env = container.get("env", [])
        return values | {each["name"]: each["value"] for each in env if "value" in each}

    def _in(self, group: str) -> str:
        root = "/apis" if "/" in group else "/api"
        return f"{root}/{group}/namespaces/{self._namespace}"

    def _list(self, path: str) -> list[Object]:
        found: list[Object] = (self._ask(path) or {}).get("items") or []
        return found


def _pool(pool: ClaimPoolSettings, *, most: int) -> Check:
    if not pool.has_claims:
        return Check(f"pool {pool.name}", "no claims", "its workers compute on the cores")
    value = f"{pool.claims} × {pool.nodes * pool.devices} devices"
    about = f"claims for {' and '.join(f'{role}s' for role in pool.roles)}"
    few = f"no node has {pool.devices} devices, at most {most}: its pods would wait forever"
    return judge(f"pool {pool.name}", value, pool.devices <= most, about, few)


def _tag(image: str) -> str:
    """Return an image's tag, or "" if it has only a digest."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[2]


class _Pools(BaseModel):
    """Named as in `GatewaySettings`, for its errors."""

    claim_pools: Json[list[ClaimPoolSettings]]


def _settings_of(values: Mapping[str, str]) -> tuple[KubernetesSettings, list[ClaimPoolSettings]]:
    # Each field is given, because the class would read the rest from this process's environment.
    given: Object = {
        name: values.get(f"{_PREFIX}{name.upper()}", field.default)
        for name, field in KubernetesSettings.model_fields.items()
    }
    pools = {"claim_pools": values.get("TANDEM_CLAIM_POOLS", "[]")}
    try:
        return KubernetesSettings(**given), _Pools.model_validate(pools).claim_pools
    except ValidationError as error:
        raise InvalidRequest(settings_fault(error)) from error


def read_settings(file: Path) -> dict[str, str]:
    """Return the variables of a file with lines NAME=VALUE, as kustomize reads it. Raises
    `InvalidRequest` and `UnknownSetting`."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(f"the settings cannot be read: {describe(error)}") from error
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    values = {name: value for name, _, value in pairs}
    check_environment(values)
    return values


def api_server() -> ApiCall:
    """Return a caller with the kubeconfig of the environment, as kubectl uses it, or with a pod's
    own rights. Raises `InvalidRequest`."""
    try:
        from kubernetes import client, config
    except ModuleNotFoundError as error:
        raise InvalidRequest("--cluster needs tandem[kubernetes]") from error
    try:
        with redirect_stdout(sys.stderr):  # only the answer goes to standard output
            config.load_config()
    except config.ConfigException as error:
        raise InvalidRequest(
            f"there is no way to a cluster ({describe(error)}); set KUBECONFIG, as for kubectl"
        ) from error
    api = client.ApiClient()
    headers = {"Accept": "application/json", "Content-Type": "application/json"}

    def ask(path: str, body: Object | None = None) -> Object | None:
        method = "GET" if body is None else "POST"
        request = api.param_serialize(
            method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            answer = api.call_api(*request, _request_timeout=20)
            content = answer.read()
        except Exception as error:
            raise InvalidRequest(f"the API server does not answer: {describe(error)}") from error
        if answer.status == 404:
            return None
        found: Object = json.loads(content)
        if answer.status >= 400:
            raise Unreadable(found.get("message", f"{path}: {answer.status}"))
        return found

    return ask
