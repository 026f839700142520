"""Device names: `cpu:0-3` is a set of cores, `cuda:0` or `cuda:GPU-…` an NVIDIA device.

A group lists its devices by these names, and a `WorkerSpec` those of its ranks. `confine` hides all
other devices from a process."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from tandem.errors import InvalidRequest, WorkerStartFailed

NO_MIG = (
    "Tandem runs on whole NVIDIA devices; turn MIG off (`nvidia-smi -mig 0`, as root) or name "
    "another device"
)
"""Ends the refusal of a MIG instance or of a device divided into them."""

_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_CUDA = re.compile(r"\d{1,3}|GPU-[A-Za-z0-9-]+")


@dataclass(frozen=True)
class Device:
    """A set of `cores`, or an NVIDIA device: its index in `nvidia-smi`'s list or a UUID prefix.

    Examples: `Device("cpu", cores=frozenset({0, 1, 4}))` prints as `cpu:0-1,4`, and `Device("cuda",
    cuda="GPU-8f6a")` as `cuda:GPU-8f6a`."""

    kind: Literal["cpu", "cuda"]
    cores: frozenset[int] = frozenset()
    cuda: str = ""

    def __str__(self) -> str:
        return f"cpu:{_ranges(self.cores)}" if self.kind == "cpu" else f"cuda:{self.cuda}"


def parse_device(text: str) -> Device:
    """Raises `InvalidRequest`."""
    kind, _, rest = text.strip().partition(":")
    if kind == "cuda" and rest.startswith("MIG-"):
        raise InvalidRequest(f"{text.strip()} is a MIG instance: {NO_MIG}")
    if kind == "cuda" and _CUDA.fullmatch(rest):
        return Device("cuda", cuda=str(int(rest)) if rest.isdecimal() else rest)
    if kind == "cpu" and (cores := _cores(rest)):
        return Device("cpu", cores=cores)
    raise InvalidRequest(
        f"{text!r} is not a device; write cores like 'cpu:0-3' or 'cpu:0,2', and an NVIDIA "
        "device like 'cuda:0' or 'cuda:GPU-' with the rest of its UUID"
    )


def devices_of_ranks(names: Sequence[str], *, ranks: int) -> list[Device]:
    """Return the device of each rank, or none if the ranks use the whole machine. Raises
    `WorkerStartFailed`."""
    try:
        devices = [parse_device(name) for name in names]
    except InvalidRequest as error:
        raise WorkerStartFailed(error.message) from error
    if devices and len(devices) != ranks:
        raise WorkerStartFailed(f"{ranks} ranks were given {len(devices)} devices, not one each")
    if len({device.kind for device in devices}) > 1:
        raise WorkerStartFailed(
            f"ranks compute on devices of one kind, not on {', '.join(map(str, devices))}"
        )
    return devices


def together(devices: Sequence[Device]) -> Device:
    """Join devices of one kind, for a process that uses all of them."""
    return Device(
        devices[0].kind,
        cores=frozenset().union(*(device.cores for device in devices)),
        cuda=",".join(device.cuda for device in devices),
    )


def _cores(text: str) -> frozenset[int]:
    """Return the cores of `0-3,6`, or none if it is invalid."""
    cores: set[int] = set()
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            return frozenset()
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            return frozenset()
        cores.update(range(first, last + 1))
    return frozenset(cores)


def _ranges(cores: frozenset[int]) -> str:
    """Return a text like `0-3,6`."""
    ordered = sorted(cores)
    starts = [a for before, a in pairwise([-2, *ordered]) if a != before + 1]
    ends = [a for a, after in pairwise([*ordered, ordered[-1] + 2]) if after != a + 1]
    pairs = zip(starts, ends, strict=True)
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs)


def nvidia_library() -> Any:
    """Return NVIDIA's library `pynvml`, or None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def confine(device: Device) -> None:
    """Hide all other devices from this process, its threads and its future children.

    Call it before the import of torch, which counts cores and GPUs. Raises `WorkerStartFailed` for
    missing cores."""
    os.environ["CUDA_VISIBLE_DEVICES"] = device.cuda
    if device.kind == "cuda":
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of nvidia-smi's list
        return
    before = frozenset(os.sched_getaffinity(0))
    missing = f"{device} cannot be used: this process may run on the cores {_ranges(before)}"
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), device.cores)
        except ProcessLookupError:
            continue  # the thread has ended
        except OSError as error:
            raise WorkerStartFailed(missing) from error
    if os.sched_getaffinity(0) != device.cores:  # the kernel ignores missing cores
        os.sched_setaffinity(0, before)
        raise WorkerStartFailed(missing)
