"""vLLM's worker for CPUs, in whatever process: it notes what it packs from its first load on, and
copies blocks of its KV cache one by one."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from sampler_service.vllm.internals import copy_blocks_singly
from sampler_service.vllm.packed_weights import note_packed_weights


class NotingWorker(CPUWorker):  # type: ignore[misc]
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        note_packed_weights(self.model_config.dtype)
        copy_blocks_singly()
        super().load_model(load_dummy_weights=load_dummy_weights)
