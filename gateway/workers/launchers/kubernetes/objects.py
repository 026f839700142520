"""The Kubernetes objects of a worker, and of its device group's claims.

A worker has a Secret with its specification and a pod per node, and its group ResourceClaims. A
worker of several nodes also has a headless Service, through which nodes find node 0, and a
NetworkPolicy between its pods. A pod is its template (`templates`) with the worker's own fields."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Literal

import yaml

from gateway.workers.launchers.kubernetes.names import (
    CLAIMS,
    COMPONENT,
    EPOCH,
    FRAMEWORK,
    GROUP,
    GROUP_SPEC,
    INSTANCE,
    METRICS_PORT,
    NODE,
    PART_OF,
    PODS,
    POLICIES,
    PORT,
    RENDEZVOUS_PORT,
    SECRETS,
    SERVICES,
    SESSION,
    SESSION_ID,
    SPEC_KEY,
    WORKER,
    WORKER_ID,
    Resource,
    claim_name,
    label_value,
    object_name,
    pod_name,
    service_account,
)
from gateway.workers.launchers.kubernetes.resources import PodResources
from gateway.workers.launchers.kubernetes.templates import Object, Template, merged
from tandem.errors import InvalidRequest
from tandem.protocol.certificate import Certificate
from tandem.protocol.worker import COMPILED, WorkerKind, WorkerSpec, compile_caches
from tandem.settings.cluster import ClaimPoolSettings, KubernetesSettings
from tandem.settings.workers import TrainerSettings

FOLDERS: Mapping[WorkerKind, Mapping[str, Literal["read", "write"]]] = {
    "trainer": {
        "models": "read",
        "weights": "write",
        "checkpoints": "write",
        "snapshots": "write",
        "spill": "write",
    },
    "sampler": {"models": "read", "weights": "read"},
}
"""A worker's mounts in the data directory. The rest, such as keys, is the gateway's alone."""

_USER_OF_IMAGES = 10001
LIFELINE = 600.0
"""Seconds without a gateway's call, after which a worker ends itself."""
_ROLE = "tandem.dev/role"
_SPEC_FOLDER = "/run/tandem/spec"
_SCRATCH = "/tmp"
_DEVICES = "devices"
_PLACEMENT = ("nodeSelector", "nodeName", "affinity", "tolerations", "schedulerName")
_MODULES: Mapping[WorkerKind, str] = {"trainer": "trainer_service", "sampler": "sampler_service"}


@dataclass(frozen=True, kw_only=True)
class Home:
    """The place and owner of objects from a gateway of this `epoch`. The owner is the Deployment
    `settings.instance` with the uid `owner`, or nobody for "". `volume` is the shared volume's
    path."""

    settings: KubernetesSettings
    namespace: str
    volume: Path
    epoch: int
    owner: str = ""

    def new(
        self, resource: Resource, name: str, *, labels: Object, annotations: Object, **rest: object
    ) -> Object:
        """Return an object. `rest` are its fields besides the metadata."""
        metadata: Object = {
            "name": name,
            "namespace": self.namespace,
            "labels": {PART_OF: "tandem", INSTANCE: self.settings.instance, **labels},
            "annotations": {EPOCH: str(self.epoch), **annotations},
        }
        if self.owner:
            owner = {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": self.settings.instance,
                "uid": self.owner,
            }
            metadata["ownerReferences"] = [owner]
        about = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}
        return about | rest


@dataclass(frozen=True, kw_only=True)
class WorkerObjects:
    """A worker's objects in order of creation. `claims` are its group's, one per pod."""

    secret: Object
    service: Object | None
    policy: Object | None
    claims: tuple[Object, ...]
    pods: tuple[Object, ...]


# --- The specification in a pod -------------------------------------------------------------------


def spec_of_pod(
    spec: WorkerSpec, *, pool: ClaimPoolSettings, home: Home, tls: Certificate
) -> WorkerSpec:
    update: dict[str, object] = {
        "host": "0.0.0.0",
        "port": PORT,
        "metrics_port": METRICS_PORT,
        "tls": tls,
        "lifeline": LIFELINE,
    }
    if (nodes := nodes_of(spec, pool)) > 1:
        name = object_name(spec.worker_id)
        update |= {"nodes": nodes, "rendezvous": f"{name}.{home.namespace}.svc:{RENDEZVOUS_PORT}"}
    if not pool.has_gpus and spec.trainer is not None and not spec.trainer.threads:
        threads = max(1, int(home.settings.cpus))  # it sees all cores of its node
        update["trainer"] = spec.trainer.model_copy(update={"threads": threads})
    return spec.model_copy(update=update)


def nodes_of(spec: WorkerSpec, pool: ClaimPoolSettings) -> int:
    return math.ceil(spec.trainer.ranks / pool.devices) if spec.trainer is not None else 1


# --- Objects --------------------------------------------------------------------------------------


def render_worker(
    spec: WorkerSpec,
    *,
    pool: ClaimPoolSettings,
    template: Template,
    resources: PodResources,
    home: Home,
) -> WorkerObjects:
    """Return a worker's objects, from the specification of `spec_of_pod`. `resources` are per pod.
    Raises `InvalidRequest` for a template with one of the worker's own fields."""
    worker = object_name(spec.worker_id)
    labels: Object = {
        COMPONENT: spec.kind,
        WORKER: label_value(spec.worker_id),
        SESSION: label_value(spec.session_id),
        GROUP: label_value(spec.group),
        FRAMEWORK: label_value(spec.framework),
    }
    annotations: Object = {WORKER_ID: spec.worker_id, SESSION_ID: spec.session_id}
    new = partial(home.new, labels=labels, annotations=annotations)
    data = base64.b64encode(spec.model_dump_json().encode()).decode()
    secret = new(SECRETS, worker, type="Opaque", immutable=True, data={SPEC_KEY: data})
    nodes = nodes_of(spec, pool)
    service = policy = None
    if nodes > 1:
        own_pods = {INSTANCE: home.settings.instance, WORKER: label_value(spec.worker_id)}
        selector = own_pods | {NODE: "0"}
        service = new(SERVICES, worker, spec=_fixed("service") | {"selector": selector})
        policy = new(POLICIES, worker, spec=_policy({"podSelector": {"matchLabels": own_pods}}))
    pods = []
    for node in range(nodes):
        pod = home.new(
            PODS,
            pod_name(spec.worker_id, node),
            labels=labels | {NODE: str(node)},
            annotations=annotations,
            spec=_pod_spec(spec, node=node, pool=pool, resources=resources, home=home),
        )
        pods.append(merged(_for_placement(template, home.settings), pod))
    claims = render_claims(spec.group, pool=pool, home=home)[:nodes]
    return WorkerObjects(
        secret=secret, service=service, policy=policy, claims=claims, pods=tuple(pods)
    )


def _fixed(part: str) -> Object:
    """Return a part of `worker-objects.yaml`."""
    found: Object = deepcopy(_fixed_parts()[part])
    return found


@cache
def _fixed_parts() -> Object:
    text = (files(__package__) / "defaults" / "worker-objects.yaml").read_text()
    parts: Object = yaml.safe_load(text)
    return parts


def _policy(own_pods: Object) -> Object:
    """Allow the traffic between one worker's pods."""
    policy = _fixed("policy") | own_pods
    policy["ingress"].insert(0, {"from": [own_pods]})
    policy["egress"].insert(0, {"to": [own_pods]})
    return policy


def check_templates(
    templates: Mapping[WorkerKind, Template], *, pools: Sequence[ClaimPoolSettings], home: Home
) -> None:
    """Raise `InvalidRequest` for a template with a worker's field, for one claim's workers on
    different nodes, and for a missing image."""
    resources = PodResources(cpu="1", memory=1, shared_memory=1, ephemeral=1)
    for pool in pools:
        for kind in pool.roles:
            if not _image(kind, home.settings):
                raise InvalidRequest(
                    f"TANDEM_KUBERNETES_{kind.upper()}_IMAGE is not set, and pool {pool.name!r} of "
                    f"TANDEM_CLAIM_POOLS is for {kind}s"
                )
            probe = WorkerSpec(
                worker_id=f"{kind}-probe",
                kind=kind,
                secret="",
                model_name="",
                model_path="",
                session_id="probe",
                group=f"{pool.name}-0",
                trainer=TrainerSettings(ranks=pool.devices * pool.nodes),
            )
            render_worker(
                probe, pool=pool, template=templates[kind], resources=resources, home=home
            )
        specs = [_for_placement(templates[k], home.settings).body["spec"] for k in pool.roles]
        for field in _PLACEMENT if pool.has_claims else ():
            if any(spec.get(field) != specs[0].get(field) for spec in specs):
                raise InvalidRequest(
                    f"pool {pool.name!r} of TANDEM_CLAIM_POOLS is for trainers and samplers, whose "
                    f"pods are on one node: spec.{field} of their templates must not differ"
                )


def render_claims(group: str, *, pool: ClaimPoolSettings, home: Home) -> tuple[Object, ...]:
    """Return a group's claims, one per node; none if the pool has no claims."""
    if not pool.has_claims:
        return ()
    request: Object = {"name": _DEVICES}
    if pool.alternatives:
        request["firstAvailable"] = [
            {"name": f"choice-{number}"}
            | _exactly(each.device_class, each.selectors, count=pool.devices)
            for number, each in enumerate(pool.alternatives)
        ]
    else:
        request["exactly"] = _exactly(pool.device_class, pool.selectors, count=pool.devices)
    devices: Object = {"requests": [request]}
    if pool.sharing is not None:
        opaque = {"driver": pool.sharing.driver, "parameters": pool.sharing.parameters}
        devices["config"] = [{"requests": [_DEVICES], "opaque": opaque}]
    digest = hashlib.sha256(json.dumps(devices, sort_keys=True).encode()).hexdigest()[:16]
    return tuple(
        home.new(
            CLAIMS,
            claim_name(group, pool=pool, node=node, instance=home.settings.instance),
            labels={COMPONENT: "claim", GROUP: label_value(group)},
            annotations={GROUP_SPEC: digest},
            spec={"devices": devices},
        )
        for node in range(pool.nodes)
    )


def _exactly(device_class: str, selectors: list[str], *, count: int) -> Object:
    asked: Object = {
        "deviceClassName": device_class,
        "allocationMode": "ExactCount",
        "count": count,
    }
    if selectors:
        asked["selectors"] = [{"cel": {"expression": each}} for each in selectors]
    return asked


def folders_of(
    kind: WorkerKind, settings: KubernetesSettings
) -> Mapping[str, Literal["read", "write"]]:
    """Return `FOLDERS` of a worker, with the folder for compiled code if enabled."""
    return {**FOLDERS[kind], COMPILED: "write"} if settings.keep_compiled else FOLDERS[kind]


def _image(kind: WorkerKind, settings: KubernetesSettings) -> str:
    return settings.trainer_image if kind == "trainer" else settings.sampler_image


def _user() -> int:
    """Return the workers' user: the gateway's own, which alone can read the data directory. A
    gateway that runs as root uses the images' user."""
    return os.getuid() or _USER_OF_IMAGES


def _for_placement(template: Template, settings: KubernetesSettings) -> Template:
    """Return the template, without the role's node selector if all roles share their nodes."""
    spec = template.body["spec"]
    if settings.placement == "strict" or "nodeSelector" not in spec:
        return template
    selector = {key: value for key, value in spec["nodeSelector"].items() if key != _ROLE}
    return replace(template, body=template.body | {"spec": spec | {"nodeSelector": selector}})


def _pod_spec(
    spec: WorkerSpec,
    *,
    node: int,
    pool: ClaimPoolSettings,
    resources: PodResources,
    home: Home,
) -> Object:
    settings = home.settings
    volumes: list[Object] = [
        {
            "name": "tandem-spec",
            "secret": {"secretName": object_name(spec.worker_id), "defaultMode": 0o440},
        },
        {"name": "tandem-scratch", "emptyDir": {"sizeLimit": str(resources.ephemeral)}},
        {
            "name": "tandem-shm",
            "emptyDir": {"medium": "Memory", "sizeLimit": str(resources.shared_memory)},
        },
    ]
    mounts: list[Object] = [
        {"name": "tandem-spec", "mountPath": _SPEC_FOLDER, "readOnly": True},
        {"name": "tandem-scratch", "mountPath": _SCRATCH},
        {"name": "tandem-shm", "mountPath": "/dev/shm"},
    ]
    if settings.volume_claim:
        claim = {"claimName": settings.volume_claim}
        volumes.append({"name": "tandem-data", "persistentVolumeClaim": claim})
        mounts += _mounts_of_volume(spec.kind, home)
    module = _MODULES[spec.kind] + (".node" if node else "")
    # torch needs a user name, and the image has none.
    environment = {"HOME": _SCRATCH, "TMPDIR": _SCRATCH, "USER": "tandem"}
    environment["GRPC_VERBOSITY"] = "ERROR"  # as agents do: strangers cause all lower messages
    if settings.keep_compiled:
        environment |= compile_caches(home.volume)
    if node:
        environment["TANDEM_NODE_RANK"] = str(node)
    memory = {"memory": str(resources.memory), "ephemeral-storage": str(resources.ephemeral)}
    container = _fixed("container") | {
        "image": _image(spec.kind, settings),
        "command": ["python", "-m", module],
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "resources": {"requests": {"cpu": resources.cpu} | memory, "limits": memory},
        "volumeMounts": mounts,
    }
    pod = _fixed("pod") | {
        "serviceAccountName": service_account(spec.kind, settings),
        "terminationGracePeriodSeconds": math.ceil(spec.stop_timeout),
        "containers": [container],
        "volumes": volumes,
    }
    pod["securityContext"] |= dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), _user())
    if pool.has_claims:
        name = claim_name(spec.group, pool=pool, node=node, instance=settings.instance)
        pod["resourceClaims"] = [{"name": _DEVICES, "resourceClaimName": name}]
        container["resources"] |= {"claims": [{"name": _DEVICES}]}
    return pod


def _mounts_of_volume(kind: WorkerKind, home: Home) -> list[Object]:
    return [
        {
            "name": "tandem-data",
            "mountPath": str(home.volume / folder),
            "subPath": folder,
            "readOnly": use == "read",
        }
        for folder, use in folders_of(kind, home.settings).items()
    ]
