"""An overlay on top of `k8s/overlays/cpu-dev`, like an administrator's.

It sets the images, the volume and a pool of claims. The secrets are made as in
docs/deploy-kubernetes.md."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from tests.cluster import settings
from tests.support.kubernetes.manifests import K8S
from tests.support.stacks import SMALL

USERS = {"data": 10001, "database": 999}
"""The users that own the folders of the volumes."""
NODE_LOST = 10

_POOL = {
    "name": "both",
    "roles": ["trainer", "sampler"],
    "claims": 1,
    "device_class": settings.DEVICE_CLASS,
    "compute": settings.COMPUTE,
    "workers": 8,
    "idle": 2,
}
"""One claim, on which the workers of all experiments take turns."""

_SETTINGS = {
    "TANDEM_KUBERNETES_TRAINER_IMAGE": settings.IMAGES["trainer"],
    "TANDEM_KUBERNETES_SAMPLER_IMAGE": settings.IMAGES["sampler"],
    "TANDEM_KUBERNETES_CPUS": "0.25",
    "TANDEM_KUBERNETES_NODE_LOST": str(NODE_LOST),
    "TANDEM_CLAIM_POOLS": json.dumps([_POOL]),
    **{f"TANDEM_{name.upper()}": value for name, value in SMALL.items() if name != "port"},
}


def write_overlay(folder: Path, namespace: str) -> Path:
    """Write the overlay into a copy of `k8s`, and return its folder."""
    shutil.copytree(K8S, folder / "k8s", ignore=shutil.ignore_patterns("secrets"))
    _write_secrets(folder / "k8s" / "overlays" / "cpu-dev" / "secrets")
    overlay = folder / "k8s" / "overlays" / "test"
    overlay.mkdir()
    _write_lines(overlay / "settings.env", [f"{key}={each}" for key, each in _SETTINGS.items()])
    for kind in ("trainer", "sampler"):
        _write_template(overlay, K8S / "base" / "templates" / f"{kind}-pod.yaml")
    volumes = _volumes(namespace) if settings.SHARED_FOLDER else []
    (overlay / "volumes.yaml").write_text(yaml.safe_dump_all(volumes))
    (overlay / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "namespace": namespace,
                "resources": ["../cpu-dev", *(["volumes.yaml"] if volumes else [])],
                "images": [
                    _image("tandem-gateway", settings.IMAGES["gateway"]),
                    _image("postgres", settings.IMAGES["postgres"]),
                ],
                "configMapGenerator": [
                    {"name": "tandem-settings", "behavior": "merge", "envs": ["settings.env"]},
                    {
                        "name": "tandem-templates",
                        "behavior": "merge",
                        "files": ["trainer-pod.yaml", "sampler-pod.yaml"],
                    },
                ],
                "patches": _patches(namespace),
            }
        )
    )
    return overlay


def _write_secrets(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    password = secrets.token_hex(24)
    (folder / "first-key").write_text(f"tml-{secrets.token_hex(32)}")
    (folder / "database-password").write_text(password)
    url = f"postgresql://tandem:{password}@tandem-database/tandem"
    (folder / "database-url").write_text(url)
    tandem = Path(sys.executable).with_name("tandem")
    command = [str(tandem), "tls", "create", str(folder / "authority")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def _write_lines(file: Path, lines: list[str]) -> None:
    file.write_text("".join(f"{line}\n" for line in lines))


def _write_template(overlay: Path, template: Path) -> None:
    """Keep workers away from the database's node, so that a test can lose theirs."""
    pod = yaml.safe_load(template.read_text())
    labels = {"app.kubernetes.io/component": "database"}
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
    preferred = {"weight": 100, "podAffinityTerm": term}
    rule = {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}
    pod["spec"]["affinity"] = {"podAntiAffinity": rule}
    (overlay / template.name).write_text(yaml.safe_dump(pod))


def _image(name: str, image: str) -> dict[str, str]:
    there, _, tag = image.rpartition(":")
    return {"name": name, "newName": there, "newTag": tag}


def _patches(namespace: str) -> list[dict]:
    """Set the storage class of the volumes: the named one, or none for a shared folder."""
    if not (storage_class := namespace if settings.SHARED_FOLDER else settings.STORAGE_CLASS):
        return []
    class_ = {"op": "add", "path": "/spec/storageClassName", "value": storage_class}
    many = {"op": "replace", "path": "/spec/accessModes", "value": ["ReadWriteMany"]}
    of_database = {**class_, "path": f"/spec/volumeClaimTemplates/0{class_['path']}"}
    return [
        {
            "target": {"kind": "PersistentVolumeClaim", "name": "tandem-data"},
            "patch": json.dumps([class_, many]),
        },
        {
            "target": {"kind": "StatefulSet", "name": "tandem-database"},
            "patch": json.dumps([of_database]),
        },
    ]


def _volumes(namespace: str) -> list[dict]:
    """Volumes in the shared folder."""
    claims = {"data": "tandem-data", "database": "files-tandem-database-0"}
    modes = {"data": "ReadWriteMany", "database": "ReadWriteOnce"}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{namespace}-{name}"},
            "spec": {
                "accessModes": [modes[name]],
                "capacity": {"storage": "20Gi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": namespace,
                "claimRef": {"namespace": namespace, "name": claim},
                "hostPath": {"path": f"{settings.SHARED_FOLDER}/{namespace}/{name}"},
            },
        }
        for name, claim in claims.items()
    ]
