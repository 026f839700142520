"""An engine's budget and sleep on a GPU that other processes share.

vLLM's own worker runs. The device is only a number of free bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker import gpu_worker as of_vllm
from vllm.v1.worker.utils import request_memory

from sampler_service.vllm import gpu_worker
from sampler_service.vllm.gpu_worker import BudgetedWorker
from sampler_service.vllm.memory import OUTSIDE_TORCH
from tandem.errors import WorkerStartFailed

GIB = 2**30
TOTAL = 80 * GIB


class Device:
    """Torch's view of a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, free: int) -> None:
        self.free = free
        self.allocated = self.peak = 0
        for module in (torch.accelerator, torch.cuda):
            monkeypatch.setattr(module, "empty_cache", lambda: None)
            monkeypatch.setattr(module, "synchronize", lambda: None)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (self.free, TOTAL))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (self.free, TOTAL))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: self.reset())

    def reset(self) -> None:
        self.peak = self.allocated

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.free -= size
        self.peak = max(self.peak, self.allocated)


class Runner:
    """The model takes 3 GiB, the largest batch 2 GiB, others `meanwhile` bytes."""

    model_memory_usage = 3 * GIB

    def __init__(self, device: Device, meanwhile: int = 0) -> None:
        self.device = device
        self.meanwhile = meanwhile

    def load_lora_model(self, *model: object) -> None:
        raise AssertionError("the model is not loaded here")

    def profile_run(self) -> None:
        self.device.allocate(2 * GIB)
        self.device.free -= self.meanwhile
        self.device.allocate(-2 * GIB)


def worker_on(device: Device, *, budget: int, meanwhile: int = 0) -> Any:
    worker = object.__new__(BudgetedWorker)
    worker.device = torch.device("cpu")
    worker.cache_config = SimpleNamespace(gpu_memory_utilization=budget / TOTAL)
    worker.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(enable_nccl_comm_suspend=False),
        compilation_config=SimpleNamespace(
            static_forward_context={}, custom_ops=[], enabled_custom_ops={}
        ),
    )
    worker.model_runner = Runner(device, meanwhile)
    worker.init_snapshot = SimpleNamespace(total_memory=TOTAL)
    return worker


@pytest.fixture(autouse=True)
def without_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda _config: nullcontext())


@pytest.mark.parametrize("meanwhile", [0, 30 * GIB, -20 * GIB])
def test_the_kv_cache_is_what_this_process_leaves_of_its_budget(monkeypatch, meanwhile):
    device = Device(monkeypatch, free=50 * GIB)
    worker = worker_on(device, budget=16 * GIB, meanwhile=meanwhile)
    device.allocate(3 * GIB)
    assert worker.determine_available_memory() == (16 - 3 - 2) * GIB - OUTSIDE_TORCH
    device.allocate(GIB)  # a model runner's tables
    assert worker.determine_available_memory() == (16 - 4 - 2) * GIB - OUTSIDE_TORCH


def test_a_budget_below_weights_and_activations_is_refused(monkeypatch):
    device = Device(monkeypatch, free=50 * GIB)
    worker = worker_on(device, budget=6 * GIB)
    device.allocate(3 * GIB)
    with pytest.raises(WorkerStartFailed, match="leaves nothing for the KV cache"):
        worker.determine_available_memory()


@pytest.mark.parametrize("fails", [False, True])
def test_vllm_starts_with_less_free_than_the_budget(monkeypatch, fails):
    """Others may allocate between our check and vLLM's."""
    device = Device(monkeypatch, free=GIB)
    worker = worker_on(device, budget=16 * GIB)

    def init_device(self: Any) -> None:
        free = SimpleNamespace(free_memory=device.free, total_memory=TOTAL, device_="cuda")
        request_memory(free, self.cache_config)
        if fails:
            raise RuntimeError("no device")

    monkeypatch.setattr(of_vllm.Worker, "init_device", init_device)
    if fails:
        with pytest.raises(RuntimeError, match="no device"):
            worker.init_device()
    else:
        worker.init_device()
    assert round(worker.cache_config.gpu_memory_utilization * TOTAL) == 16 * GIB
    with pytest.raises(ValueError, match="Free memory"):
        init_device(worker)


@pytest.mark.parametrize("taken", [0, 40 * GIB])
def test_an_engine_falls_asleep_while_others_allocate(monkeypatch, taken):
    device = Device(monkeypatch, free=50 * GIB)
    worker = worker_on(device, budget=16 * GIB)
    asleep = []

    class Backend:
        def suspend(self, level: int) -> None:
            device.free += 11 * GIB - taken
            asleep.append(level)

    worker._sleep_mode_backend = Backend()
    worker.sleep(1)
    assert asleep == [1]
    if taken:
        with pytest.raises(AssertionError, match="Memory usage increased"):
            of_vllm.Worker.sleep(worker, 1)


def test_any_other_fault_of_a_sleep_is_one(monkeypatch):
    worker = worker_on(Device(monkeypatch, free=50 * GIB), budget=16 * GIB)

    class Backend:
        def suspend(self, level: int) -> None:
            raise AssertionError("a pool was not there")

    worker._sleep_mode_backend = Backend()
    with pytest.raises(AssertionError, match="a pool"):
        worker.sleep(1)


@pytest.mark.parametrize("experts", [False, True])
def test_kernels_of_routers_are_for_models_with_experts(monkeypatch, tmp_path, experts):
    from vllm.model_executor.kernels.linear.cute_dsl import ll_bf16

    config = '{"model_type": "x", "num_experts": 8}' if experts else '{"model_type": "x"}'
    (tmp_path / "config.json").write_text(config)
    monkeypatch.setattr(ll_bf16, "_cutedsl_available", None)
    loaded = []
    monkeypatch.setattr(
        of_vllm.Worker, "load_model", lambda self, *, load_dummy_weights: loaded.append(self)
    )
    worker = worker_on(Device(monkeypatch, free=50 * GIB), budget=16 * GIB)
    worker.model_config = SimpleNamespace(model=str(tmp_path))
    worker.load_model()
    assert loaded == [worker]
    assert ll_bf16._cutedsl_available is (None if experts else False)
