"""The environment's description of the cluster; see `tests/cluster/__init__.py`."""

from __future__ import annotations

import os
from pathlib import Path

_PREFIX = "TANDEM_TEST_"


def _setting(name: str, default: str = "") -> str:
    return os.environ.get(_PREFIX + name, default)


KUBECONFIG = os.environ.get("KUBECONFIG", "")
IMAGE = _setting("IMAGE", "python:3.11-slim")
IMAGES = {
    "gateway": _setting("GATEWAY_IMAGE", "tandem-gateway:dev"),
    "trainer": _setting("TRAINER_IMAGE", "tandem-trainer:dev"),
    "sampler": _setting("SAMPLER_IMAGE", "tandem-sampler:dev"),
    "postgres": _setting("POSTGRES_IMAGE", "postgres:17"),
}
DEVICE_CLASS = _setting("DEVICE_CLASS", "gpu.nvidia.com")
COMPUTE = _setting("COMPUTE", "cpu")
STORAGE_CLASS = _setting("STORAGE_CLASS")
SHARED_FOLDER = _setting("SHARED_FOLDER")
ARTEFACTS = Path(folder) if (folder := _setting("ARTEFACTS")) else None
BINARIES = Path(folder) if (folder := _setting("BINARIES")) else None
HAS_NODES = _setting("NODES", "1") == "1"
DEVICE_CLASS_OF_OWN_NODES = _setting("DEVICE_CLASS")
"""A control plane that the tests start has no devices."""
LOSE_NODE, RETURN_NODE = _setting("LOSE_NODE"), _setting("RETURN_NODE")
NO_NODES = (
    "KUBECONFIG names no cluster"
    if not KUBECONFIG
    else ""
    if HAS_NODES
    else "the control plane has no nodes, and pods never run"
)
"""The reason to skip tests of pods, or ""."""


def images_of_the_machine() -> list[str]:
    """Images that a node of its own needs from this machine's Docker, and cannot pull."""
    return [IMAGES[name] for name in ("gateway", "trainer", "sampler")]
