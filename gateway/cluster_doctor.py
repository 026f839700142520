"""What a Kubernetes cluster has of what workers need, for `tandem doctor --cluster`: run in a
process of its own by an administrator, whose kubeconfig says more than the gateway may see.

The settings are those of a file, such as the settings.env of an overlay; else those of the
gateway's Deployment; before there is one, those of the environment.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import orjson
from pydantic import TypeAdapter, ValidationError

from gateway.doctor import Finding, Level
from gateway.workers.launchers.kubernetes.objects import service_account
from tandem.cluster_settings import ClaimPoolSettings, KubernetesSettings
from tandem.errors import InvalidRequest, TandemError, describe
from tandem.setting_names import check_environment
from tandem.settings import GatewaySettings

Object: TypeAlias = dict[str, Any]
"""An object of Kubernetes, as JSON."""

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
"""What the gateway's Role has, by group and resource."""

_DRA = "/apis/resource.k8s.io/v1"
_ROLE = "tandem.dev/role"
_ENFORCE = "pod-security.kubernetes.io/enforce"
_VOLUME_CHECK = "k8s/jobs/check-volume.yaml asks it from two nodes"


class Unreadable(Exception):
    """The API server refused to tell."""


class ApiCall(Protocol):
    """Asks the API server: returns the JSON of its answer, None for one that says that there is no
    such thing. Raises `Unreadable`."""

    def __call__(self, path: str, body: Object | None = None) -> Object | None: ...


@dataclass(frozen=True)
class Chosen:
    """The settings of the gateway that the cluster runs, or would."""

    cluster: KubernetesSettings
    pools: list[ClaimPoolSettings]
    source: str

    @property
    def classes(self) -> set[str]:
        """The DeviceClasses of the pools."""
        found = {pool.device_class for pool in self.pools}
        found |= {each.device_class for pool in self.pools for each in pool.alternatives or ()}
        return found - {""}


class ClusterDoctor:
    """`ask` asks the API server. `own` are the settings of the environment, `file` those of a
    file, if there is one."""

    def __init__(
        self,
        ask: ApiCall,
        *,
        namespace: str,
        own: GatewaySettings,
        file: Mapping[str, str] | None = None,
    ) -> None:
        self._ask = ask
        self._namespace = namespace
        self._own = own
        self._file = file

    def examine(self) -> list[Finding]:
        deployment = self._ask(f"{self._in('apps/v1')}/deployments/{self._own.kubernetes.instance}")
        chosen = self._settings(deployment)
        parts = {
            "version": self._version(),
            "devices": self._devices(chosen),
            "nodes": self._nodes(chosen),
            "namespace": self._namespaced(),
            "gateway": self._gateway(deployment, chosen),
        }
        if deployment is not None:  # what an overlay makes with it
            parts |= {
                "volume": self._volume(chosen),
                "accounts": self._accounts(chosen),
                "rights": self._rights(deployment),
                "network": self._network(),
            }
        findings = [Finding("settings", chosen.source)]
        for name, part in parts.items():
            try:
                findings += part
            except Unreadable as error:
                about = f"{error}: ask with a kubeconfig that may read it"
                findings.append(Finding(name, "not known", about, level="absent"))
        return findings

    # --- Settings -----------------------------------------------------------------------------

    def _settings(self, deployment: Object | None) -> Chosen:
        if self._file is not None:
            return _chosen(self._file, "of the file")
        if deployment is None:
            return Chosen(self._own.kubernetes, self._own.claim_pools, "of the environment")
        container = _container(deployment)
        values: dict[str, str] = {}
        for source in container.get("envFrom", []):
            name = source.get("configMapRef", {}).get("name", "")
            found = self._ask(f"{self._in('v1')}/configmaps/{name}") if name else None
            values |= (found or {}).get("data", {})
        for each in container.get("env", []):
            if "value" in each:
                values[each["name"]] = each["value"]
        return _chosen(values, f"of the Deployment {deployment['metadata']['name']}")

    # --- The cluster --------------------------------------------------------------------------

    def _version(self) -> Iterator[Finding]:
        found = self._must("/version")
        version = f"{found['major']}.{found['minor']}"
        minor = int(re.sub(r"\D.*", "", found["minor"]) or 0)
        if minor >= NEEDS_MINOR:
            yield Finding("Kubernetes", version, "has ResourceClaims of resource.k8s.io/v1")
        else:
            about = f"the gateway watches claims, even if it makes none: 1.{NEEDS_MINOR} has them"
            yield Finding("Kubernetes", version, f"{about}; upgrade", level="problem")

    def _devices(self, chosen: Chosen) -> Iterator[Finding]:
        if not chosen.pools:
            about = "TANDEM_CLAIM_POOLS is empty, so that no worker can be placed: name a pool"
            yield Finding("pools", "none", about, level="problem")
            return
        if self._ask(_DRA) is None:
            about = "the API server does not serve it: turn DynamicResourceAllocation on"
            yield Finding("resource.k8s.io/v1", "absent", about, level="problem")
            return
        there = {each["metadata"]["name"] for each in self._list(f"{_DRA}/deviceclasses")}
        for name in sorted(chosen.classes - there):
            known = f"there are {', '.join(sorted(there))}" if there else "there is none"
            about = f"a pool names it; {known}: install the driver, or correct the pool"
            yield Finding(f"DeviceClass {name}", "absent", about, level="problem")
        for name in sorted(chosen.classes & there):
            yield Finding(f"DeviceClass {name}", "there")
        by_node = self._by_node()
        for driver, nodes in sorted(by_node.items()):
            sizes = sorted({size for found in nodes.values() for size in found if size})
            value = ", ".join(f"{node}: {len(found)}" for node, found in sorted(nodes.items()))
            about = f"devices of each node, of {' or '.join(sizes)}" if sizes else "devices of each"
            yield Finding(f"driver {driver}", value, about)
        if not by_node:
            about = "no driver publishes devices: see whether its pods run on the nodes with GPUs"
            level: Level = "problem" if chosen.classes else "absent"
            yield Finding("ResourceSlices", "none", about, level=level)
        most = max(
            (len(found) for nodes in by_node.values() for found in nodes.values()), default=0
        )
        for pool in chosen.pools:
            yield _pool(pool, most)

    def _by_node(self) -> dict[str, dict[str, list[str]]]:
        """Return the memory of the devices, "" where none is told, by driver and node."""
        found: defaultdict[str, defaultdict[str, list[str]]]
        found = defaultdict(lambda: defaultdict(list))
        for each in self._list(f"{_DRA}/resourceslices"):
            spec = each["spec"]
            node = spec.get("nodeName", "several nodes")
            for device in spec.get("devices") or []:
                memory = device.get("capacity", {}).get("memory", {}).get("value", "")
                found[spec["driver"]][node].append(memory)
        return {driver: dict(nodes) for driver, nodes in found.items()}

    def _nodes(self, chosen: Chosen) -> Iterator[Finding]:
        nodes = self._list("/api/v1/nodes")
        if chosen.cluster.placement == "shared":
            yield Finding("nodes", f"{len(nodes)}", "trainers and samplers select the same ones")
            return
        for role in sorted({role for pool in chosen.pools for role in pool.roles}, reverse=True):
            those = [n for n in nodes if n["metadata"].get("labels", {}).get(_ROLE) == role]
            label = f"kubectl label node NODE {_ROLE}={role}"
            yield Finding(
                f"nodes for {role}s",
                f"{len(those)} of {len(nodes)}",
                f"by the label {_ROLE}, which the templates select"
                if those
                else f"none has the label that the templates select: {label}",
                level="ok" if those else "problem",
            )

    # --- The namespace ------------------------------------------------------------------------

    def _namespaced(self) -> Iterator[Finding]:
        found = self._ask(f"/api/v1/namespaces/{self._namespace}")
        if found is None:
            about = "there is none yet: apply an overlay of k8s/, or name another with --namespace"
            yield Finding(f"namespace {self._namespace}", "absent", about, level="absent")
            return
        level = found["metadata"].get("labels", {}).get(_ENFORCE, "privileged")
        if level != "privileged":
            yield Finding("Pod Security", level, "all pods of Tandem pass it")
            return
        label = f"kubectl label --overwrite namespace {self._namespace} {_ENFORCE}=restricted"
        about = f"whoever may make pods here may make any: {label}"
        yield Finding("Pod Security", "not enforced", about, level="absent")

    def _volume(self, chosen: Chosen) -> Iterator[Finding]:
        name = chosen.cluster.volume_claim
        if not name:
            yield Finding("volume", "of the templates", "TANDEM_KUBERNETES_VOLUME_CLAIM is empty")
            return
        claim = self._ask(f"{self._in('v1')}/persistentvolumeclaims/{name}")
        if claim is None:
            about = "there is none: gateway and workers have no files in common without it"
            yield Finding(f"volume {name}", "absent", about, level="problem")
            return
        phase, modes = claim["status"].get("phase", ""), claim["spec"]["accessModes"]
        value = f"{phase}, {', '.join(modes)}, {claim['spec'].get('storageClassName') or 'static'}"
        if phase != "Bound":
            about = f"kubectl --namespace {self._namespace} describe pvc {name} says why"
            # A class may wait for the first pod, before it makes a volume.
            level: Level = "absent" if phase == "Pending" else "problem"
            yield Finding(f"volume {name}", value, about, level=level)
        elif "ReadWriteMany" in modes:
            about = f"whether a rename is seen at once elsewhere: {_VOLUME_CHECK}"
            yield Finding(f"volume {name}", value, about)
        elif len(self._list("/api/v1/nodes")) == 1:
            yield Finding(f"volume {name}", value, "enough for a cluster of one node")
        else:
            about = "pods of several nodes mount it: take a class, or an export, for ReadWriteMany"
            yield Finding(f"volume {name}", value, about, level="problem")

    def _gateway(self, deployment: Object | None, chosen: Chosen) -> Iterator[Finding]:
        images = {
            "trainers": chosen.cluster.trainer_image,
            "samplers": chosen.cluster.sampler_image,
        }
        own = "" if deployment is None else _container(deployment).get("image", "")
        for role, image in images.items():
            yield _image(role, image, own)
        if deployment is None:
            about = "there is no Deployment of this name (TANDEM_KUBERNETES_INSTANCE) yet"
            yield Finding("gateway", "absent", about, level="absent")
            return
        name, asked = deployment["metadata"]["name"], deployment["spec"].get("replicas", 1)
        ready = deployment.get("status", {}).get("readyReplicas", 0)
        label = f"tandem.dev/serving={name}"
        serving = self._list(f"{self._in('v1')}/pods?labelSelector={label.replace('=', '%3D')}")
        value = f"{ready} of {asked} ready, {len(serving)} serving"
        about = f"kubectl --namespace {self._namespace} logs deployment/{name} says more"
        fine = ready and len(serving) == 1
        yield Finding("gateway", value, "" if fine else about, "ok" if fine else "problem")

    def _accounts(self, chosen: Chosen) -> Iterator[Finding]:
        """Kubernetes makes no pod for an account that is not there."""
        accounts = {
            "trainers": service_account("trainer", chosen.cluster),
            "samplers": service_account("sampler", chosen.cluster),
        }
        for role, account in accounts.items():
            name = f"account of {role}"
            if self._ask(f"{self._in('v1')}/serviceaccounts/{account}") is not None:
                yield Finding(name, account)
                continue
            about = "there is none, so that none starts: apply k8s/base/service-accounts.yaml"
            yield Finding(name, f"{account}, absent", about, level="problem")

    def _rights(self, deployment: Object) -> Iterator[Finding]:
        account = deployment["spec"]["template"]["spec"].get("serviceAccountName", "default")
        refused = [
            f"{verb} {resource}"
            for (group, resource), verbs in RIGHTS.items()
            for verb in verbs
            if not self._may(account, group=group, resource=resource, verb=verb)
        ]
        yield Finding(
            f"rights of {account}",
            f"{len(refused)} missing" if refused else "complete",
            f"it may not {', '.join(refused)}: apply k8s/base/rbac.yaml" if refused else "",
            level="problem" if refused else "ok",
        )

    def _may(self, account: str, *, group: str, resource: str, verb: str) -> bool:
        plural, _, subresource = resource.partition("/")
        asked = {"namespace": self._namespace, "verb": verb, "group": group, "resource": plural}
        if subresource:
            asked["subresource"] = subresource
        if plural == "deployments":
            asked["name"] = self._own.kubernetes.instance
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{self._namespace}"]
        answer = self._must(
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {
                    "user": f"system:serviceaccount:{self._namespace}:{account}",
                    "groups": [*groups, "system:authenticated"],
                    "resourceAttributes": asked,
                },
            },
        )
        return bool(answer["status"]["allowed"])

    def _network(self) -> Iterator[Finding]:
        found = self._list(f"{self._in('networking.k8s.io/v1')}/networkpolicies")
        yield Finding(
            "network policies",
            f"{len(found)}" if found else "none",
            "whether they are enforced, the network plugin decides; the API does not tell"
            if found
            else "every pod reaches the workers, which want a certificate and a secret",
            level="ok" if found else "absent",
        )

    # --- Asking -------------------------------------------------------------------------------

    def _in(self, group: str) -> str:
        root = "/apis" if "/" in group else "/api"
        return f"{root}/{group}/namespaces/{self._namespace}"

    def _must(self, path: str, body: Object | None = None) -> Object:
        found = self._ask(path, body)
        if found is None:
            raise Unreadable(f"{path} is not there")
        return found

    def _list(self, path: str) -> list[Object]:
        found: list[Object] = (self._ask(path) or {}).get("items") or []
        return found


def _chosen(values: Mapping[str, str], source: str) -> Chosen:
    try:
        prefix = "TANDEM_KUBERNETES_"
        own = {k.removeprefix(prefix).lower(): v for k, v in values.items() if prefix in k}
        known = KubernetesSettings.model_fields.keys() & own.keys()
        cluster = KubernetesSettings(**{key: own[key] for key in known})  # type: ignore[arg-type]
        pools = TypeAdapter(list[ClaimPoolSettings]).validate_json(
            values.get("TANDEM_CLAIM_POOLS", "[]")
        )
    except ValidationError as error:
        raise InvalidRequest(f"the settings of the gateway are refused: {error}") from error
    return Chosen(cluster, pools, source)


def read_settings(file: Path) -> dict[str, str]:
    """Return the variables of a file with lines NAME=VALUE, as kustomize reads it. Raises
    `InvalidRequest` and `UnknownSetting`."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise InvalidRequest(f"the settings cannot be read: {describe(error)}") from error
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    values = {name: value for name, _, value in pairs}
    check_environment(values)
    return values


def _pool(pool: ClaimPoolSettings, most: int) -> Finding:
    name = f"pool {pool.name}"
    if not pool.has_claims:
        return Finding(name, "no claims", "its workers compute on the cores")
    value = f"{_many(pool.claims, 'claim')} of {_many(pool.nodes * pool.devices, 'device')}"
    if pool.devices > most:
        about = f"no node has {pool.devices} devices: {most} at most; its pods would wait for ever"
        return Finding(name, value, about, level="problem")
    return Finding(name, value, f"for {' and '.join(f'{role}s' for role in pool.roles)}")


def _image(role: str, image: str, own: str) -> Finding:
    """`own` is the gateway's image, "" where it is not known."""
    name = f"image of {role}"
    if not image:
        about = f"set TANDEM_KUBERNETES_{role[:-1].upper()}_IMAGE; without it none starts"
        return Finding(name, "not set", about, level="problem")
    if _tag(own) and _tag(image) and _tag(own) != _tag(image):
        about = f"the gateway's has the tag {_tag(own)}: all three must be of one version"
        return Finding(name, image, about, level="absent")
    return Finding(name, image)


def _tag(image: str) -> str:
    """Return an image's tag; "" for one that is named by its digest alone, or not at all."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[2]


def _container(deployment: Object) -> Object:
    found: Object = deployment["spec"]["template"]["spec"]["containers"][0]
    return found


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


# --- The process ------------------------------------------------------------------------------


def _asker() -> ApiCall:
    """Return what asks by the kubeconfig of the environment, as kubectl does, or as a pod."""
    try:
        from kubernetes import client, config
    except ModuleNotFoundError as error:
        raise InvalidRequest("--cluster needs tandem[kubernetes]") from error
    try:
        with redirect_stdout(sys.stderr):  # it says what it tries; the answer alone goes to stdout
            config.load_config()
    except config.ConfigException as error:
        raise InvalidRequest(
            f"there is no way to a cluster ({describe(error)}); set KUBECONFIG, as for kubectl"
        ) from error
    api = client.ApiClient()

    def ask(path: str, body: Object | None = None) -> Object | None:
        method = "GET" if body is None else "POST"
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        serialized = api.param_serialize(
            method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            answer = api.call_api(*serialized, _request_timeout=20)
        except Exception as error:
            raise InvalidRequest(f"the API server does not answer: {describe(error)}") from error
        content = answer.read()
        if answer.status == 404:
            return None
        if answer.status >= 400:
            raise Unreadable(json.loads(content).get("message", f"{path}: {answer.status}"))
        found: Object = json.loads(content)
        return found

    return ask


def main() -> int:
    request = orjson.loads(sys.stdin.buffer.read())
    try:
        own = GatewaySettings()
        namespace = request["namespace"] or own.kubernetes.namespace or "tandem"
        file = read_settings(Path(request["settings"])) if request["settings"] else None
        doctor = ClusterDoctor(_asker(), namespace=namespace, own=own, file=file)
        answer: Object = {"findings": [asdict(each) for each in doctor.examine()]}
    except Unreadable as error:
        answer = {"error": str(error)}
    except TandemError as error:
        answer = {"error": error.message}
    sys.stdout.buffer.write(orjson.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
