"""vLLM's worker for GPUs, with a memory budget independent of other processes.

vLLM measures the whole device's free memory at its start, so other processes shrink its KV cache or
make it fail. Here torch counts this process's memory. The model may have adapters of its head."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.worker.gpu_worker import Worker

from sampler_service.vllm.adapter_internals import adapt_heads
from sampler_service.vllm.internals import skip_router_kernels
from sampler_service.vllm.memory import OUTSIDE_TORCH, cache_bytes
from tandem.telemetry import get_log
from tandem.weights.model_config import has_experts

_NEXT_TO_NOTHING = 1e-6
"""The share of the device that must be free at vLLM's start."""
_SLEEPS_BESIDE_OTHERS = "Memory usage increased after sleeping."
"""vLLM's error about other processes' memory. The engine is asleep by then."""


class BudgetedWorker(Worker):  # type: ignore[misc]
    """`gpu_memory_utilization` is its budget, as a share of the device: weights, activations, KV
    cache and `OUTSIDE_TORCH`."""

    def init_device(self) -> None:
        share = self.cache_config.gpu_memory_utilization
        self.cache_config.gpu_memory_utilization = _NEXT_TO_NOTHING
        try:
            super().init_device()
        finally:
            self.cache_config.gpu_memory_utilization = share

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if not has_experts(Path(self.model_config.model)):
            skip_router_kernels()
        adapt_heads(self.model_runner)
        super().load_model(load_dummy_weights=load_dummy_weights)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def determine_available_memory(self) -> int:
        """Compute the largest batch once. Returns the bytes for the KV cache.

        Raises `WorkerStartFailed` if none are left."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.profile_run()
        peak = torch.cuda.max_memory_allocated(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        total = self.init_snapshot.total_memory
        budget = round(total * self.cache_config.gpu_memory_utilization)
        get_log().info(
            "engine_memory",
            device_bytes=total,
            budget_bytes=budget,
            weights_bytes=int(self.model_runner.model_memory_usage),
            before_bytes=before,
            peak_bytes=peak,
            outside_torch_bytes=OUTSIDE_TORCH,
        )
        return cache_bytes(budget, peak=peak)

    def sleep(self, level: int = 1) -> None:
        try:
            super().sleep(level)
        except AssertionError as error:
            if str(error) != _SLEEPS_BESIDE_OTHERS:
                raise
