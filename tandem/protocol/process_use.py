"""A worker measures its own processes, and tells the gateway with each heartbeat.

All sums grow from the first look, so a lost heartbeat loses nothing. The measurement has a thread
of its own, because a driver may be slow to answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from tandem.errors import describe
from tandem.protocol.devices import nvidia_library
from tandem.telemetry import get_log

USE_METADATA_KEY = "tandem-use"
"""The trailing metadata of a health check with a `ProcessUse`, as JSON."""

_LOOK_SECONDS = 5.0
_PERCENT = 100.0


class ProcessUse(BaseModel):
    """The use of a worker's processes: itself and its children.

    `seconds` have passed, and `cpu_seconds` were computed. `memory_bytes` are resident now.
    `gpu_seconds` is the utilisation of its devices (0 to 1, their mean) times the seconds, and
    `gpu_peak` the largest utilisation. Both are None without a device. `gpu_bytes` is the memory
    of its processes on all devices now, or None if the driver does not name them. In a `shared`
    measurement, the utilisation is that of the devices, with other processes on them."""

    model_config = ConfigDict(frozen=True)

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    gpu_seconds: float | None = None
    gpu_peak: float | None = None
    gpu_bytes: int | None = None
    shared: bool = False

    @classmethod
    def parse(cls, text: str) -> ProcessUse | None:
        """Return None for the text of an unknown version."""
        with suppress(ValidationError):
            return cls.model_validate_json(text)
        return None


@dataclass(frozen=True)
class _Load:
    """The utilisation of the devices, 0 to 1, and the bytes of the worker's processes on them."""

    utilisation: float
    bytes: int | None
    shared: bool


class DeviceLoad:
    """Reads NVIDIA's library `nvml` for the devices with these names (none: all)."""

    def __init__(self, nvml: Any, devices: Sequence[str]) -> None:
        self._nvml = nvml
        names = [name.partition(":")[2] for name in devices]
        self._handles = [
            handle
            for index in range(nvml.nvmlDeviceGetCount())
            for handle in [nvml.nvmlDeviceGetHandleByIndex(index)]
            if not names
            or any(_is_named(name, index, nvml.nvmlDeviceGetUUID(handle)) for name in names)
        ]
        self._seen = dict.fromkeys(range(len(self._handles)), 0)
        """By device, the driver's time of the newest sample."""

    def read_load(self, pids: Iterable[int]) -> _Load | None:
        """Return the load since the last call, or None without a device."""
        mine = set(pids)
        memory = [self._memory(handle, mine) for handle in self._handles]
        used = [n for n, each in enumerate(memory) if each is not None]
        if used:
            loads = [self._of_processes(number, mine) for number in used]
        else:  # the driver numbers processes in another namespace
            loads = [self._of_device(number) for number in self._seen]
        if not loads:
            return None
        known = [each for each in memory if each is not None]
        return _Load(
            utilisation=sum(value for value, _ in loads) / len(loads),
            bytes=sum(known) if known else None,
            shared=any(shared for _, shared in loads),
        )

    def _memory(self, handle: Any, mine: set[int]) -> int | None:
        with suppress(self._nvml.NVMLError):
            found = [
                each
                for each in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                if each.pid in mine and each.usedGpuMemory is not None
            ]
            if found:
                return sum(int(each.usedGpuMemory) for each in found)
        return None

    def _of_processes(self, number: int, mine: set[int]) -> tuple[float, bool]:
        """Return the utilisation of a device, and whether it includes other processes."""
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(
                self._handles[number], self._seen[number]
            )
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) in (0, self._nvml.NVML_ERROR_NOT_FOUND):
                return 0.0, False  # no process computed since the last look
            return self._of_device(number)
        self._seen[number] = max([self._seen[number], *(each.timeStamp for each in samples)])
        times = {each.timeStamp for each in samples}
        busy = sum(each.smUtil for each in samples if each.pid in mine) / _PERCENT
        return min(1.0, busy / max(1, len(times))), False

    def _of_device(self, number: int) -> tuple[float, bool]:
        with suppress(self._nvml.NVMLError):
            rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handles[number])
            return rates.gpu / _PERCENT, True
        return 0.0, True


class UseMeter:
    """Measures this process and its children. `devices` are the names of the worker's devices."""

    def __init__(
        self,
        devices: Sequence[str],
        *,
        nvml: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._load = None if nvml is None else _device_load(nvml, devices)
        self._process = psutil.Process()
        self._at = clock()
        self._cpu = {each: seconds for each, seconds, _ in self._look()}
        self.use = ProcessUse()

    def measure(self) -> None:
        """Add the use since the last call to `use`. Raises `psutil.Error`."""
        found = self._look()
        now = self._clock()
        passed, self._at = now - self._at, now
        # A process that was not there before counts from its start.
        computed = sum(seconds - self._cpu.get(each, 0.0) for each, seconds, _ in found)
        self._cpu = {each: seconds for each, seconds, _ in found}
        changes: dict[str, object] = {
            "seconds": self.use.seconds + passed,
            "cpu_seconds": self.use.cpu_seconds + max(0.0, computed),
            "memory_bytes": sum(size for _, _, size in found),
        }
        load = self._load.read_load(each.pid for each, _, _ in found) if self._load else None
        if load is not None:
            changes |= {
                "gpu_seconds": (self.use.gpu_seconds or 0.0) + load.utilisation * passed,
                "gpu_peak": max(self.use.gpu_peak or 0.0, load.utilisation),
                "gpu_bytes": load.bytes,
                "shared": self.use.shared or load.shared,
            }
        self.use = self.use.model_copy(update=changes)

    def _look(self) -> list[tuple[psutil.Process, float, int]]:
        """Return each process with its seconds of computing and its resident bytes."""
        found = []
        for each in [self._process, *self._process.children(recursive=True)]:
            with suppress(psutil.Error), each.oneshot():
                times = each.cpu_times()
                found.append((each, times.user + times.system, int(each.memory_info().rss)))
        return found


class UseThread:
    """Measures in a thread after `start_measuring`: the newest `use`, and its `text` for the
    heartbeat, at first ""."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices
        self._began = False
        self._meter: UseMeter | None = None
        self._failed = False
        self.use = ProcessUse()
        self.text = ""

    def start_measuring(self) -> None:
        if not self._began:
            self._began = True
            threading.Thread(target=self._measure, name="process-use", daemon=True).start()

    def _measure(self) -> None:
        while True:
            self.measure_once()
            time.sleep(_LOOK_SECONDS)

    def measure_once(self) -> None:
        """Begin to measure, or measure until now. An error is logged once."""
        try:
            if self._meter is None:
                on_cores = any(name.startswith("cpu:") for name in self._devices)
                nvml = None if on_cores else nvidia_library()
                self._meter = UseMeter(self._devices, nvml=nvml)
            else:
                self._meter.measure()
                self.use, self.text = self._meter.use, self._meter.use.model_dump_json()
        except Exception as error:  # noqa: BLE001 - the next look may succeed
            if not self._failed:
                self._failed = True
                get_log().warning("use_not_measured", reason=describe(error, typed=True))


def _device_load(nvml: Any, devices: Sequence[str]) -> DeviceLoad | None:
    """Return None for a driver that refuses to name its devices."""
    try:
        return DeviceLoad(nvml, devices)
    except nvml.NVMLError as error:
        get_log().warning("devices_not_measured", reason=describe(error, typed=True))
        return None


def _is_named(name: str, index: int, uuid: str) -> bool:
    return name == str(index) if name.isdecimal() else uuid.startswith(name)
