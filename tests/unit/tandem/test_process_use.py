from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest

from tandem.protocol import process_use
from tandem.protocol.process_use import ProcessUse, UseMeter, UseThread

OTHER = 4_000_000  # no process has this id


class Driver:
    """A driver with two devices. `processes` and `samples` are by device."""

    NVML_ERROR_NOT_FOUND = 6

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            self.value = value

    def __init__(self) -> None:
        self.processes: dict[int, dict[int, int]] = {0: {}, 1: {}}
        self.samples: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
        self.refusal = 0
        self.rate = 0
        self.now = 0

    def nvmlDeviceGetCount(self):
        return len(self.processes)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}abc"

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=size)
            for pid, size in self.processes[handle].items()
        ]

    def nvmlDeviceGetProcessUtilization(self, handle, since):
        assert since == self.now  # the time of the newest sample before
        if self.refusal:
            raise self.NVMLError(self.refusal)
        if not self.samples[handle]:
            raise self.NVMLError(self.NVML_ERROR_NOT_FOUND)
        return [
            SimpleNamespace(pid=pid, smUtil=percent, timeStamp=self.now + 1)
            for pid, percent in self.samples[handle]
        ]

    def nvmlDeviceGetUtilizationRates(self, _handle):
        return SimpleNamespace(gpu=self.rate)


@pytest.fixture
def driver():
    return Driver()


def measured(driver, *, seconds, devices=(), before=None):
    clock = SimpleNamespace(now=0.0)
    meter = UseMeter(devices, nvml=driver, clock=lambda: clock.now)
    clock.now = seconds
    meter.measure()
    return meter.use


def test_memory_and_utilisation_are_those_of_the_workers_own_processes(driver):
    driver.processes[1] = {os.getpid(): 3 * 2**30, OTHER: 9 * 2**30}
    driver.samples[1] = [(os.getpid(), 40), (OTHER, 55)]
    use = measured(driver, seconds=10.0)
    assert use.gpu_bytes == 3 * 2**30
    assert use.gpu_seconds == pytest.approx(4.0)
    assert use.gpu_peak == pytest.approx(0.4)
    assert not use.shared


def test_a_process_without_samples_was_idle(driver):
    driver.processes[0] = {os.getpid(): 2**30}
    use = measured(driver, seconds=10.0)
    assert (use.gpu_seconds, use.gpu_peak, use.shared) == (0.0, 0.0, False)


def test_a_driver_without_samples_of_processes_gives_the_devices_utilisation_as_shared(driver):
    driver.processes[0] = {os.getpid(): 2**30}
    driver.refusal, driver.rate = 3, 70  # NVML_ERROR_NOT_SUPPORTED
    use = measured(driver, seconds=10.0)
    assert use.gpu_seconds == pytest.approx(7.0)
    assert use.gpu_bytes == 2**30
    assert use.shared


def test_a_driver_that_does_not_know_our_process_ids_gives_no_memory(driver):
    driver.processes[0] = {OTHER: 2**30}  # the numbers of another namespace
    driver.rate = 50
    use = measured(driver, seconds=4.0, devices=["cuda:GPU-0"])
    assert (use.gpu_bytes, use.gpu_seconds, use.shared) == (None, 2.0, True)


def test_utilisation_is_the_mean_of_the_workers_devices(driver):
    driver.processes = {0: {os.getpid(): 1}, 1: {os.getpid(): 2}}
    driver.samples = {0: [(os.getpid(), 100)], 1: [(os.getpid(), 50)]}
    use = measured(driver, seconds=1.0, devices=["cuda:0", "cuda:1"])
    assert (use.gpu_seconds, use.gpu_bytes) == (0.75, 3)


def test_without_a_driver_nothing_is_said_about_devices():
    use = measured(None, seconds=1.0)
    assert (use.gpu_seconds, use.gpu_peak, use.gpu_bytes) == (None, None, None)
    assert use.memory_bytes > 0


def test_a_driver_that_cannot_name_its_devices_leaves_processors_and_memory(driver, monkeypatch):
    def fail():
        raise Driver.NVMLError(999)

    monkeypatch.setattr(driver, "nvmlDeviceGetCount", fail)
    use = measured(driver, seconds=1.0)
    assert use.gpu_seconds is None and use.memory_bytes > 0


def test_a_failed_look_is_logged_once_and_the_next_one_counts_its_time(monkeypatch):
    logged = []
    log = SimpleNamespace(warning=lambda event, **_: logged.append(event))
    monkeypatch.setattr(process_use, "get_log", lambda: log)
    thread = UseThread(["cpu:0"])
    thread.measure_once()
    with monkeypatch.context() as patch:
        patch.setattr(psutil.Process, "children", lambda *_, **__: raise_(psutil.AccessDenied()))
        for _ in range(3):
            thread.measure_once()
    assert thread.text == "" and logged == ["use_not_measured"]
    thread.measure_once()
    assert thread.use.memory_bytes > 0 and ProcessUse.parse(thread.text) == thread.use


def raise_(error):
    raise error


def test_a_use_travels_as_text_also_to_a_gateway_that_knows_fewer_fields():
    use = ProcessUse(seconds=2.0, cpu_seconds=1.0, gpu_bytes=None, shared=True)
    assert ProcessUse.parse(use.model_dump_json()) == use
    assert ProcessUse.parse('{"seconds": 1.5, "new": 3}') == ProcessUse(seconds=1.5)
    assert ProcessUse.parse("") is None
