"""vLLM's worker for CPUs, in whatever process: it notes what it packs from its first load on,
copies blocks of its KV cache one by one, and lets its model have adapters of the head."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from sampler_service.vllm.adapter_internals import adapt_heads, leave_experts_plain
from sampler_service.vllm.internals import copy_blocks_singly
from sampler_service.vllm.packed_weights import note_packed_weights


class NotingWorker(CPUWorker):  # type: ignore[misc]
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        note_packed_weights(self.model_config.dtype)
        copy_blocks_singly()
        adapt_heads(self.model_runner)
        leave_experts_plain()
        super().load_model(load_dummy_weights=load_dummy_weights)
