"""The specification of a worker's pod: its container with mounts, user and claim. Also that of a
job's preflight, a pod without the claim."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from gateway.workers.launchers.kubernetes.home import Home, fixed
from gateway.workers.launchers.kubernetes.names import (
    claim_name,
    object_name,
    role_of,
    service_account,
)
from gateway.workers.launchers.kubernetes.resources import PREFLIGHT, PodResources
from gateway.workers.launchers.kubernetes.templates import Object
from tandem.agent.preflight import JobNeeds
from tandem.protocol.worker import COMPILED, WorkerKind, WorkerSpec, compile_caches
from tandem.settings.cluster import ClaimPoolSettings, KubernetesSettings

Folders: TypeAlias = Mapping[str, Literal["read", "write"]]

_MODELS: Folders = {"models": "read"}
FOLDERS: Mapping[WorkerKind, Folders] = {
    "trainer": {
        **_MODELS,
        "weights": "write",
        "checkpoints": "write",
        "snapshots": "write",
        "spill": "write",
    },
    "sampler": {**_MODELS, "weights": "read"},
    "job": _MODELS,
}
"""A worker's mounts in the data directory. The rest, such as keys, is the gateway's alone. A job
also mounts its own folder."""
CHECK = "preflight"
"""The init container of a job's preflight."""
DEVICES = "devices"
"""The name of a pod's claim within the pod, and of the claim's request."""

_USER_OF_IMAGES = 10001
_SPEC_FOLDER = "/run/tandem/spec"
_SCRATCH = "/tmp"
_MODULES: Mapping[WorkerKind, str] = {
    "trainer": "trainer_service",
    "sampler": "sampler_service",
    "job": "trainer_service.jobs",
}


def pod_spec(
    spec: WorkerSpec,
    *,
    node: int,
    pool: ClaimPoolSettings,
    resources: PodResources,
    home: Home,
) -> Object:
    settings = home.settings
    mounted = folders_of(spec.kind, settings)
    if spec.job is not None:
        mounted = {**mounted, **_own_folder(spec.job.folder, home)}
    pod, container = _bare_pod(spec.kind, mounted, resources=resources, home=home)
    container |= fixed("serving")
    module = _MODULES[spec.kind] + (".node" if node else "")
    container["command"] = ["python", "-m", module]
    environment: dict[str, str] = {}
    if settings.keep_compiled:
        environment |= compile_caches(home.volume)
    if node:
        environment["TANDEM_NODE_RANK"] = str(node)
    if spec.job is not None and not pool.has_gpus:
        environment["OMP_NUM_THREADS"] = str(max(1, int(settings.cpus)))
    container["env"] += _variables(environment)
    container["volumeMounts"].insert(
        0, {"name": "tandem-spec", "mountPath": _SPEC_FOLDER, "readOnly": True}
    )
    secret = {"secretName": object_name(spec.worker_id), "defaultMode": 0o440}
    pod["volumes"].insert(0, {"name": "tandem-spec", "secret": secret})
    pod["terminationGracePeriodSeconds"] = math.ceil(spec.stop_timeout)
    if pool.has_claims:
        name = claim_name(spec.group, pool=pool, node=node, instance=settings.instance)
        pod["resourceClaims"] = [{"name": DEVICES, "resourceClaimName": name}]
        container["resources"] |= {"claims": [{"name": DEVICES}]}
    return pod


def preflight_spec(needs: JobNeeds, *, home: Home) -> Object:
    """Return a pod without claim. Its init container checks `needs` with the job's image, user and
    mounts, and its other container does nothing."""
    mounted = {**FOLDERS["job"], **_own_folder(needs.folder, home)}
    pod, container = _bare_pod("job", mounted, resources=PREFLIGHT, home=home)
    program = ["python", "-m", "tandem.agent.preflight", "--report-file", "/dev/termination-log"]
    check = {**container, "name": CHECK, "command": [*program, "--needs", needs.model_dump_json()]}
    container["command"] = ["python", "-c", ""]
    return pod | {"initContainers": [check], "terminationGracePeriodSeconds": 1}


def folders_of(kind: WorkerKind, settings: KubernetesSettings) -> Folders:
    """Return `FOLDERS` of a worker, with the folder for compiled code if enabled."""
    return {**FOLDERS[kind], COMPILED: "write"} if settings.keep_compiled else FOLDERS[kind]


def image_of(kind: WorkerKind, settings: KubernetesSettings) -> str:
    return settings.trainer_image if role_of(kind) == "trainer" else settings.sampler_image


def _bare_pod(
    kind: WorkerKind, folders: Folders, *, resources: PodResources, home: Home
) -> tuple[Object, Object]:
    """Return a pod and its container, without command, specification and claim."""
    settings = home.settings
    volumes: list[Object] = [
        {"name": "tandem-scratch", "emptyDir": {"sizeLimit": str(resources.ephemeral)}},
        {
            "name": "tandem-shm",
            "emptyDir": {"medium": "Memory", "sizeLimit": str(resources.shared_memory)},
        },
    ]
    mounts: list[Object] = [
        {"name": "tandem-scratch", "mountPath": _SCRATCH},
        {"name": "tandem-shm", "mountPath": "/dev/shm"},
    ]
    if settings.volume_claim:
        claim = {"claimName": settings.volume_claim}
        volumes.append({"name": "tandem-data", "persistentVolumeClaim": claim})
        mounts += [
            {
                "name": "tandem-data",
                "mountPath": str(home.volume / folder),
                "subPath": folder,
                "readOnly": use == "read",
            }
            for folder, use in folders.items()
        ]
    # torch needs a user name, and the image has none.
    environment = {"HOME": _SCRATCH, "TMPDIR": _SCRATCH, "USER": "tandem"}
    environment["GRPC_VERBOSITY"] = "ERROR"  # as agents do: strangers cause all lower messages
    memory = {"memory": str(resources.memory), "ephemeral-storage": str(resources.ephemeral)}
    container = fixed("container") | {
        "image": image_of(kind, settings),
        "env": _variables(environment),
        "resources": {"requests": {"cpu": resources.cpu} | memory, "limits": memory},
        "volumeMounts": mounts,
    }
    pod = fixed("pod") | {
        "serviceAccountName": service_account(role_of(kind), settings),
        "containers": [container],
        "volumes": volumes,
    }
    pod["securityContext"] |= dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), _user())
    return pod, container


def _own_folder(folder: str, home: Home) -> Folders:
    return {str(Path(folder).relative_to(home.volume)): "write"}


def _variables(environment: Mapping[str, str]) -> list[Object]:
    return [{"name": key, "value": value} for key, value in environment.items()]


def _user() -> int:
    """Return the workers' user: the gateway's own, which alone can read the data directory. A
    gateway that runs as root uses the images' user."""
    return os.getuid() or _USER_OF_IMAGES
