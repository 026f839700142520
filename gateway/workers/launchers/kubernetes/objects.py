"""The Kubernetes objects of a worker, and of its device group's claims.

A worker has a Secret with its specification and a pod per node, and its group ResourceClaims. A
worker of several nodes also has a headless Service, through which nodes find node 0, and a
NetworkPolicy between its pods. A pod is its template (`templates`) with the worker's own fields."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gateway.workers.launchers.kubernetes.home import Home, fixed
from gateway.workers.launchers.kubernetes.names import (
    CLAIMS,
    COMPONENT,
    FRAMEWORK,
    GROUP,
    GROUP_SPEC,
    INSTANCE,
    METRICS_PORT,
    NODE,
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
    Role,
    claim_name,
    label_value,
    object_name,
    pod_name,
)
from gateway.workers.launchers.kubernetes.pod_spec import (
    CHECK,
    DEVICES,
    image_of,
    pod_spec,
    preflight_spec,
)
from gateway.workers.launchers.kubernetes.resources import PodResources
from gateway.workers.launchers.kubernetes.templates import Object, Template, merged
from tandem.agent.preflight import JobNeeds
from tandem.errors import InvalidRequest
from tandem.protocol.certificate import Certificate
from tandem.protocol.worker import WorkerSpec
from tandem.settings.cluster import ClaimPoolSettings, KubernetesSettings
from tandem.settings.sharing import Sharing
from tandem.settings.workers import TrainerSettings

LIFELINE = 600.0
"""Seconds without a gateway's call, after which a worker ends itself."""
_ROLE = "tandem.dev/role"
_GPU_DRIVER = "gpu.nvidia.com"
_GPU_CONFIG: Object = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"}
_PLACEMENT = ("nodeSelector", "nodeName", "affinity", "tolerations", "schedulerName")


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


def render_preflight(needs: JobNeeds, *, template: Template, home: Home) -> Object:
    """Return the pod that checks a job's needs. It has the template of the job's pod."""
    worker_id = f"{CHECK}-{Path(needs.folder).name}"
    pod = home.new(
        PODS,
        object_name(worker_id),
        labels={
            COMPONENT: CHECK,
            WORKER: label_value(worker_id),
            FRAMEWORK: label_value(needs.framework),
        },
        annotations={WORKER_ID: worker_id},
        spec=preflight_spec(needs, home=home),
    )
    return merged(_for_placement(template, home.settings), pod)


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
        service = new(SERVICES, worker, spec=fixed("service") | {"selector": selector})
        policy = new(POLICIES, worker, spec=_policy({"podSelector": {"matchLabels": own_pods}}))
    pods = []
    for node in range(nodes):
        pod = home.new(
            PODS,
            pod_name(spec.worker_id, node),
            labels=labels | {NODE: str(node)},
            annotations=annotations,
            spec=pod_spec(spec, node=node, pool=pool, resources=resources, home=home),
        )
        pods.append(merged(_for_placement(template, home.settings), pod))
    claims = render_claims(spec.group, pool=pool, home=home, sharing=spec.sharing)[:nodes]
    return WorkerObjects(
        secret=secret, service=service, policy=policy, claims=claims, pods=tuple(pods)
    )


def _policy(own_pods: Object) -> Object:
    """Allow the traffic between one worker's pods."""
    policy = fixed("policy") | own_pods
    policy["ingress"].insert(0, {"from": [own_pods]})
    policy["egress"].insert(0, {"to": [own_pods]})
    return policy


def check_templates(
    templates: Mapping[Role, Template], *, pools: Sequence[ClaimPoolSettings], home: Home
) -> None:
    """Raise `InvalidRequest` for a template with a worker's field, for one claim's workers on
    different nodes, and for a missing image."""
    resources = PodResources(cpu="1", memory=1, shared_memory=1, ephemeral=1)
    for pool in pools:
        for role in pool.roles:
            if not image_of(role, home.settings):
                raise InvalidRequest(
                    f"TANDEM_KUBERNETES_{role.upper()}_IMAGE is not set, and pool {pool.name!r} of "
                    f"TANDEM_CLAIM_POOLS is for {role}s"
                )
            probe = WorkerSpec(
                worker_id=f"{role}-probe",
                kind=role,
                secret="",
                model_name="",
                model_path="",
                session_id="probe",
                group=f"{pool.name}-0",
                trainer=TrainerSettings(ranks=pool.devices * pool.nodes),
            )
            render_worker(
                probe, pool=pool, template=templates[role], resources=resources, home=home
            )
        specs = [_for_placement(templates[k], home.settings).body["spec"] for k in pool.roles]
        for field in _PLACEMENT if pool.has_claims else ():
            if any(spec.get(field) != specs[0].get(field) for spec in specs):
                raise InvalidRequest(
                    f"pool {pool.name!r} of TANDEM_CLAIM_POOLS is for trainers and samplers, whose "
                    f"pods are on one node: spec.{field} of their templates must not differ"
                )


def render_claims(
    group: str, *, pool: ClaimPoolSettings, home: Home, sharing: Sharing
) -> tuple[Object, ...]:
    """Return a group's claims for workers that share it so, one per node; none if the pool has no
    claims. NVIDIA's driver refuses a configuration unless its feature gate is on, so a claim has
    one only if its pool names this sharing."""
    if not pool.has_claims:
        return ()
    request: Object = {"name": DEVICES}
    if pool.alternatives:
        request["firstAvailable"] = [
            {"name": f"choice-{number}"}
            | _exactly(each.device_class, each.selectors, count=pool.devices)
            for number, each in enumerate(pool.alternatives)
        ]
    else:
        request["exactly"] = _exactly(pool.device_class, pool.selectors, count=pool.devices)
    devices: Object = {"requests": [request]}
    strategy = sharing.strategy(memory_bytes=pool.memory_bytes)
    if pool.has_gpus and pool.sharing == sharing and strategy is not None:
        parameters = _GPU_CONFIG | {"sharing": strategy}
        opaque = {"driver": _GPU_DRIVER, "parameters": parameters}
        devices["config"] = [{"requests": [DEVICES], "opaque": opaque}]
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


def _for_placement(template: Template, settings: KubernetesSettings) -> Template:
    """Return the template, without the role's node selector if all roles share their nodes."""
    spec = template.body["spec"]
    if settings.placement == "strict" or "nodeSelector" not in spec:
        return template
    selector = {key: value for key, value in spec["nodeSelector"].items() if key != _ROLE}
    return replace(template, body=template.body | {"spec": spec | {"nodeSelector": selector}})
