"""A job as a `TrainJob` of Kubeflow Trainer 2.3, and the runtime of such jobs.

The runtime has the pods: one downloads the data, one the model, and then the nodes train. The
TrainJob has one job's values. Kubeflow gives the ranks to torchrun in `PET_*`. A volume is the
job's folder. Its `job.json` is an annotation of the nodes' pods, so no third object is needed."""

from __future__ import annotations

import json
import re
from typing import Any

from tandem.backends.description import BackendDescription
from tandem.backends.jobs import JobConfiguration, JobPaths, JobResources
from tandem.backends.rendering import job_request, render_job
from tandem.errors import InvalidField, UnsupportedByBackend

Manifest = dict[str, Any]

API_VERSION = "trainer.kubeflow.org/v1alpha1"
ANCESTOR_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
FRAMEWORK_LABEL = "tandem.dev/framework"
REQUEST_ANNOTATION = "tandem.dev/job"
RESERVED = (
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
)
"""The variables that Kubeflow sets in the container `node`. A TrainJob with one is refused."""
INITIALIZERS = {"dataset": "dataset-initializer", "model": "model-initializer"}
_RELEASE = "v2.3.0"  # of the initialisers' images

_WORKSPACE = "/workspace"  # Kubeflow's initialisers write to its folders `dataset` and `model`
_IMAGE_PACKAGES = "/opt/tandem/.venv/lib/python3.11/site-packages"  # of deploy/trl.Dockerfile
_USER = 10001
_STORAGE = "100Gi"
_VOLUME = "initializer"  # Kubeflow requires this name
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,30}[a-z0-9])?")
_URI = re.compile(r"(hf|s3)://[!-~]+")


def image_paths(backend: BackendDescription) -> JobPaths:
    """Return the places of a job in a pod with the image of its framework."""
    return JobPaths(
        python=f"/opt/tandem/.venv/{backend.framework}/bin/python",
        program=f"{_IMAGE_PACKAGES}/trainer_service/jobs/{backend.name}",
        folder=_WORKSPACE,
        model=f"{_WORKSPACE}/model",
    )


def render_trainjob(
    backend: BackendDescription,
    configuration: JobConfiguration,
    *,
    name: str,
    model: str,
    data: str,
    image: str,
    initializers: str,
    resources: JobResources,
) -> tuple[Manifest, Manifest]:
    """Return the `ClusterTrainingRuntime` and the `TrainJob` of a job.

    `image` is the job's. `initializers` is the place of Kubeflow's images `dataset-initializer` and
    `model-initializer`, such as `registry.example.org/kubeflow/trainer`.
    `model` and `data` are addresses such as hf://OWNER/NAME or s3://BUCKET/PREFIX. The data have a
    file `train.jsonl`, and perhaps `eval.jsonl`. Raises `UnsupportedByBackend` for a job that
    Kubeflow cannot run, and `InvalidField`."""
    if backend.kind != "job":
        raise UnsupportedByBackend(
            f"the trainer backend {backend.name} computes single operations of a run, and a "
            "TrainJob is a whole job; use a job backend such as trl"
        )
    if not _NAME.fullmatch(name):
        raise InvalidField(
            f"{name[:64]!r} is no name of a TrainJob: it has at most 32 small letters, digits and "
            "hyphens, and begins with a letter",
            field="name",
        )
    for field, address in (("model", model), ("data", data)):
        if not _URI.fullmatch(address):
            raise InvalidField(
                f"{field} is {address[:100]!r}, and Kubeflow downloads hf://OWNER/NAME or "
                "s3://BUCKET/PREFIX: the cluster does not see this machine's files or names",
                field=field,
            )
    configuration.validate_resources(resources)
    runtime = _runtime(backend, image, initializers, several_nodes=resources.nodes > 1)
    job = {
        "apiVersion": API_VERSION,
        "kind": "TrainJob",
        "metadata": {"name": name, "labels": {FRAMEWORK_LABEL: backend.framework}},
        "spec": {
            "runtimeRef": {
                "apiGroup": API_VERSION.partition("/")[0],
                "kind": runtime["kind"],
                "name": runtime["metadata"]["name"],
            },
            "initializer": {"dataset": {"storageUri": data}, "model": {"storageUri": model}},
            "trainer": _trainer(backend, configuration, image, resources),
            "runtimePatches": [_request_patch(backend, configuration, resources)],
        },
    }
    return runtime, job


def _trainer(
    backend: BackendDescription,
    configuration: JobConfiguration,
    image: str,
    resources: JobResources,
) -> Manifest:
    paths, ranks = image_paths(backend), resources.processes * resources.nodes
    spec = render_job(backend, configuration, paths, ranks)
    if reserved := sorted(set(RESERVED) & spec.environment.keys()):
        raise UnsupportedByBackend(
            f"the trainer backend {backend.name} sets {reserved[0]}, which Kubeflow sets itself"
        )
    words = len(configuration.command(paths))
    needs = {"requests": {"cpu": str(resources.processes)}}
    if resources.device != "cpu":
        needs = {"limits": {"nvidia.com/gpu": str(resources.processes)}}
    return {
        "image": image,
        "command": list(spec.argv[:words]),
        "args": list(spec.argv[words:]),
        "env": [
            {"name": each, "value": spec.environment[each]} for each in sorted(spec.environment)
        ],
        "numNodes": resources.nodes,
        "numProcPerNode": resources.processes,
        "resourcesPerNode": needs,
    }


def _request_patch(
    backend: BackendDescription, configuration: JobConfiguration, resources: JobResources
) -> Manifest:
    """Return the patch of the runtime that gives the nodes' pods this job's `job.json`."""
    paths = image_paths(backend)
    request = job_request(
        backend=backend.name,
        configuration=configuration.model_dump(mode="json"),
        model=paths.model,
        folder=paths.folder,
        attempt=1,
        processes=resources.processes * resources.nodes,
    )
    pod = {"metadata": {"annotations": {REQUEST_ANNOTATION: json.dumps(request)}}}
    node = {"name": "node", "template": {"spec": {"template": pod}}}
    return {
        "manager": "tandem.dev/train",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
    }


def _runtime(
    backend: BackendDescription, image: str, initializers: str, *, several_nodes: bool
) -> Manifest:
    """Return the runtime of all jobs of a backend. Several nodes need a volume that they share."""
    claim = {
        "metadata": {"name": _VOLUME},
        "spec": {
            "accessModes": ["ReadWriteMany" if several_nodes else "ReadWriteOnce"],
            "resources": {"requests": {"storage": _STORAGE}},
        },
    }
    jobs = [_initializer_job(name, initializers) for name in INITIALIZERS.values()]
    return {
        "apiVersion": API_VERSION,
        "kind": "ClusterTrainingRuntime",
        "metadata": {
            "name": f"tandem-{backend.framework}" + ("-nodes" if several_nodes else ""),
            "labels": {
                "trainer.kubeflow.org/framework": backend.framework,
                FRAMEWORK_LABEL: backend.framework,
            },
        },
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            "template": {
                "spec": {
                    # The result outlives its job.
                    "volumeClaimPolicies": [
                        {"templates": [claim], "retentionPolicy": {"whenDeleted": "Retain"}}
                    ],
                    "replicatedJobs": [*jobs, _node_job(backend, image)],
                }
            },
        },
    }


def _initializer_job(name: str, initializers: str) -> Manifest:
    container = {
        "name": name,
        "image": f"{initializers}/{name}:{_RELEASE}",
        "volumeMounts": [{"name": _VOLUME, "mountPath": _WORKSPACE}],
    }
    return {
        "name": name,
        "template": {
            "metadata": {"labels": {ANCESTOR_LABEL: name}},
            "spec": {"template": {"spec": {"containers": [container]}}},
        },
    }


def _node_job(backend: BackendDescription, image: str) -> Manifest:
    container = {
        "name": "node",
        "image": image,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": _VOLUME, "mountPath": _WORKSPACE},
            {
                "name": _VOLUME,
                "mountPath": f"{_WORKSPACE}/data",
                "subPath": "dataset",
                "readOnly": True,
            },
            {"name": "job", "mountPath": f"{_WORKSPACE}/job.json", "subPath": "job.json"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    annotation = {"fieldPath": f"metadata.annotations['{REQUEST_ANNOTATION}']"}
    file = {"path": "job.json", "fieldRef": annotation}
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "job", "downwardAPI": {"items": [file]}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return {
        "name": "node",
        "dependsOn": [{"name": each, "status": "Complete"} for each in INITIALIZERS.values()],
        "template": {
            "metadata": {"labels": {ANCESTOR_LABEL: "trainer"}},
            "spec": {
                "backoffLimit": 0,  # one node alone cannot join the others again
                "template": {
                    "metadata": {"labels": {FRAMEWORK_LABEL: backend.framework}},
                    "spec": pod,
                },
            },
        },
    }
