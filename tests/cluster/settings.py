"""The environment's description of the cluster; see `tests/cluster/__init__.py`."""

from __future__ import annotations

import os

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
LOSE_NODE, RETURN_NODE = _setting("LOSE_NODE"), _setting("RETURN_NODE")
