"""A host's cores, memory and NVIDIA devices (by NVML)."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tandem.backends.frameworks import Framework, installed_frameworks
from tandem.backends.registry import backends_of_runs, described_frameworks
from tandem.errors import InvalidRequest
from tandem.protocol.devices import NO_MIG, nvidia_library

NO_SUSPENDER = "nobody can suspend processes there"
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_LIMITS = (_CGROUP / "memory.max", _CGROUP / "memory" / "memory.limit_in_bytes")


@dataclass(frozen=True)
class Accelerator:
    """An NVIDIA device. `index` is nvidia-smi's."""

    index: int
    uuid: str
    name: str
    memory_bytes: int

    def __str__(self) -> str:
        return f"cuda:{self.index} ({self.uuid})"


@dataclass(frozen=True)
class Host:
    """A host and its limits.

    `cores` are the numbers of this process's cores. `memory_bytes` respects a container's limit.
    `backends` are the `backends_of_runs` of trainers, and `frameworks` those that are installed.
    `no_suspender` is the reason why its agent cannot suspend processes, or ""."""

    name: str = ""
    cores: tuple[int, ...] = ()
    memory_bytes: int = 0
    accelerators: tuple[Accelerator, ...] = ()
    backends: Mapping[str, str] = field(default_factory=dict)
    frameworks: tuple[Framework, ...] = ()
    no_suspender: str = NO_SUSPENDER


def this_host() -> Host:
    return Host(
        name=platform.node(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        memory_bytes=_memory_bytes(),
        accelerators=accelerators(),
        backends=backends_of_runs(),
        frameworks=installed_frameworks(described_frameworks()),
    )


def accelerators() -> tuple[Accelerator, ...]:
    """Return the NVIDIA devices of this process, none without a driver.

    A device that does not answer is left out. Raises `InvalidRequest` for MIG instances, and for an
    ambiguous name in CUDA_VISIBLE_DEVICES."""
    found, divided = list[Accelerator](), set[int]()
    with _nvml() as nvml:
        for index in range(nvml.nvmlDeviceGetCount() if nvml else 0):
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                found.append(
                    Accelerator(
                        index=index,
                        uuid=nvml.nvmlDeviceGetUUID(handle),
                        name=nvml.nvmlDeviceGetName(handle),
                        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                    )
                )
                with suppress(nvml.NVMLError):  # a device without MIG
                    if nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
                        divided.add(index)
    usable = _visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
    for each in usable:
        if each.index in divided:
            raise InvalidRequest(
                f"{each}, {each.name}, is divided into MIG instances: {NO_MIG} in "
                "CUDA_VISIBLE_DEVICES"
            )
    return usable


def accelerator_named(name: str, found: Sequence[Accelerator]) -> Accelerator | None:
    """Return the device with this index or UUID prefix, as CUDA reads it. Raises `InvalidRequest`
    if several match."""
    if name.isdecimal():
        return next((each for each in found if each.index == int(name)), None)
    if whole := [each for each in found if each.uuid == name]:
        return whole[0]
    matching = [each for each in found if name.startswith("GPU-") and each.uuid.startswith(name)]
    if len(matching) > 1:
        raise InvalidRequest(
            f"{name} is ambiguous: {' and '.join(map(str, matching))} begin so; write more of the "
            "UUID"
        )
    return matching[0] if matching else None


def _visible(found: Sequence[Accelerator], names: str | None) -> tuple[Accelerator, ...]:
    """Return the devices in CUDA_VISIBLE_DEVICES, or all if it is unset (None).

    CUDA stops reading at the first unknown name."""
    if names is None:
        return tuple(found)
    visible = set[int]()
    for name in map(str.strip, names.split(",")):
        if name.startswith("MIG-"):
            raise InvalidRequest(f"CUDA_VISIBLE_DEVICES names the MIG instance {name}: {NO_MIG}")
        if (named := accelerator_named(name, found)) is None:
            break
        visible.add(named.index)
    return tuple(each for each in found if each.index in visible)


def why_no_mps() -> str:
    """Return why workers here cannot be clients of NVIDIA's MPS daemon, or ""."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    if (Path(folder) / "control").exists():
        return ""
    return (
        f"no MPS daemon listens in {folder}: start `nvidia-cuda-mps-control -d` as the agent's user"
        ", with the agent's CUDA_MPS_PIPE_DIRECTORY, or choose another `sharing` of the group"
    )


def free_memory_bytes() -> int:
    """Return the host's free memory, within a container's limit."""
    bounds = [int(psutil.virtual_memory().available)]
    with suppress(OSError, ValueError, KeyError):  # no such cgroup, or "max"
        limit = int((_CGROUP / "memory.max").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        reclaimable = int(dict(line.split() for line in lines)["inactive_file"])
        used = int((_CGROUP / "memory.current").read_text()) - reclaimable
        bounds.append(limit - used)
    return max(0, min(bounds))


def driver_version() -> str:
    """Return the driver's version, such as "570.86.10", or ""."""
    with _nvml() as nvml:
        return str(nvml.nvmlSystemGetDriverVersion()) if nvml else ""


def driver_cuda_version() -> tuple[int, int]:
    """Return the newest CUDA version of the driver, such as (13, 0), or (0, 0)."""
    with _nvml() as nvml:
        number = int(nvml.nvmlSystemGetCudaDriverVersion_v2()) if nvml else 0
    return number // 1000, number % 1000 // 10


@contextmanager
def _nvml() -> Iterator[Any]:
    """Yield NVIDIA's library, or None without a driver."""
    nvml = nvidia_library()
    try:
        yield nvml
    finally:
        if nvml:
            nvml.nvmlShutdown()


def _memory_bytes() -> int:
    bounds = [int(psutil.virtual_memory().total)]
    for limit in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such cgroup, or "max"
            bounds.append(int(limit.read_text()))
    return min(bounds)
