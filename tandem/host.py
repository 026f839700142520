"""What a host has that workers can run on: cores, memory, and the accelerators that NVML knows."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_LIMITS = (_CGROUP / "memory.max", _CGROUP / "memory" / "memory.limit_in_bytes")


@dataclass(frozen=True)
class Accelerator:
    """An NVIDIA device; its `index` is that of nvidia-smi."""

    index: int
    uuid: str
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Host:
    """`cores` are the numbers of those that this process may run on; `memory_bytes` is what it may
    use, which is less than the machine has where a container bounds it."""

    name: str = ""
    cores: tuple[int, ...] = ()
    memory_bytes: int = 0
    accelerators: tuple[Accelerator, ...] = ()


def this_host() -> Host:
    return Host(
        name=platform.node(),
        cores=_cores(),
        memory_bytes=_memory_bytes(),
        accelerators=accelerators(),
    )


def accelerators() -> tuple[Accelerator, ...]:
    """Return the NVIDIA devices that this process may use; none where there is no driver. One that
    does not answer, such as after a fault, is left out."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    found = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                found.append(
                    Accelerator(
                        index=index,
                        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
                        name=_text(pynvml.nvmlDeviceGetName(handle)),
                        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    )
                )
    finally:
        pynvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(found)
    names = [name.strip() for name in visible.split(",")]
    return tuple(each for each in found if str(each.index) in names or each.uuid in names)


def free_memory_bytes() -> int:
    """Return what of the host's memory can be had now, also within the bound of a container."""
    bounds = [int(psutil.virtual_memory().available)]
    with suppress(OSError, ValueError, KeyError):  # no such cgroup, or "max"
        limit = int((_CGROUP / "memory.max").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        reclaimable = int(dict(line.split() for line in lines)["inactive_file"])
        used = int((_CGROUP / "memory.current").read_text()) - reclaimable
        bounds.append(limit - used)
    return max(0, min(bounds))


def driver_version() -> str:
    """Return that of NVIDIA's driver, such as "570.86.10"; "" where there is none."""
    try:
        import pynvml
    except ImportError:
        return ""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ""
    try:
        return _text(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _cores() -> tuple[int, ...]:
    if sys.platform == "linux":
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _memory_bytes() -> int:
    bounds = [int(psutil.virtual_memory().total)]
    for limit in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such cgroup, or "max"
            bounds.append(int(limit.read_text()))
    return min(bounds)
