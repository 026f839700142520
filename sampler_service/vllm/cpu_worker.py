"""vLLM's worker for CPUs, which notes what it packs from its first load on, in whatever process."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from sampler_service.vllm.packed_weights import note_packed_weights


class NotingWorker(CPUWorker):  # type: ignore[misc]
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        note_packed_weights(self.model_config.dtype)
        super().load_model(load_dummy_weights=load_dummy_weights)
