"""Replaces NVIDIA's library: each UUID in NVIDIA_FAKE_GPUS, a JSON list, is an H200.

A UUID that ends in "/MIG" is a divided device. Put this folder first on a process's path, or call
`install`."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

NVML_DEVICE_MIG_ENABLE = 1


class NVMLError(Exception):
    pass


def install(monkeypatch, *uuids: str) -> None:
    """Let this process and its children find these devices."""
    monkeypatch.setitem(sys.modules, "pynvml", sys.modules[__name__])
    monkeypatch.setenv("NVIDIA_FAKE_GPUS", json.dumps(uuids))
    path = os.path.dirname(__file__)  # noqa: PTH120 - the name of a folder, for a variable
    monkeypatch.setenv("PYTHONPATH", path, prepend=os.pathsep)


def _uuids() -> list[str]:
    return json.loads(os.environ.get("NVIDIA_FAKE_GPUS", "[]"))


def nvmlInit() -> None:
    if "NVIDIA_FAKE_GPUS" not in os.environ:
        raise NVMLError("there is no driver")


def nvmlShutdown() -> None:
    return


def nvmlDeviceGetCount() -> int:
    return len(_uuids())


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return _uuids()[handle].removesuffix("/MIG")


def nvmlDeviceGetName(_handle: int) -> str:
    return "NVIDIA H200"


def nvmlDeviceGetMemoryInfo(_handle: int) -> SimpleNamespace:
    return SimpleNamespace(total=143_771 * 2**20)


def nvmlDeviceGetMigMode(handle: int) -> list[int]:
    if not _uuids()[handle].endswith("/MIG"):
        raise NVMLError("not supported")
    return [NVML_DEVICE_MIG_ENABLE, 0]


def nvmlSystemGetDriverVersion() -> str:
    return "580.95.05"


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    return 13_000
