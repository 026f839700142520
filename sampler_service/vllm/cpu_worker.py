"""vLLM's worker for CPUs, with the changes of `internals` and `adapter_internals`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.worker.cpu_worker import CPUWorker

from sampler_service.vllm.adapter_internals import (
    adapt_heads,
    leave_experts_plain,
    multiply_by_slot,
)
from sampler_service.vllm.internals import multiply_plainly
from sampler_service.vllm.memory import UnwrittenZeros

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class ChangedWorker(CPUWorker):  # type: ignore[misc]
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        multiply_plainly()
        multiply_by_slot()
        adapt_heads(self.model_runner)
        leave_experts_plain()
        super().load_model(load_dummy_weights=load_dummy_weights)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        with UnwrittenZeros():
            super().initialize_from_config(kv_cache_config)
