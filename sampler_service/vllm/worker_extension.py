"""Extends vLLM's worker: in-place loads, prompt scoring, sleep.

vLLM mixes `WeightsExtension` into its worker (`worker_extension_cls`), so `self.model_runner` is
vLLM's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from sampler_service.engine import EngineMemory, PromptScores, PromptScoring
from sampler_service.vllm.adapter_internals import adapters_in
from sampler_service.vllm.adapter_sums import AdapterSums, adapter_sums
from sampler_service.vllm.copies import CopiedModel
from sampler_service.vllm.internals import (
    forget_packed_experts,
    load_in_place,
    parts_of_worker,
    use_adapter_in,
    use_prompt_hook,
)
from sampler_service.vllm.memory import (
    drop_weights,
    release_pages,
    resident_bytes,
    trim_heap,
)
from sampler_service.vllm.prompt_scoring import PromptScorer
from sampler_service.weights.files import read_tensors
from sampler_service.weights.handoff import open_handoff
from sampler_service.weights.staging import staged, staging_threads
from tandem.telemetry import configure_logging
from tandem.v1 import common_pb2
from tandem.weights.sums import sum_of

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class WeightsExtension:
    """Methods for `collective_rpc`. The prefix `tandem_` avoids clashes of names, which vLLM
    forbids."""

    model_runner: GPUModelRunner

    _tandem_scorer: PromptScorer
    _tandem_copied: CopiedModel

    def tandem_prepare(self, *, seed: int) -> None:
        """Prepare the worker. `seed` is for samples without one, and equal in an engine's workers.

        vLLM's own is 0 in all engines."""
        if self._tandem_workers > 1:  # this is vLLM's process
            configure_logging(service="sampler")
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # used by the second model runner
        self._tandem_scorer = PromptScorer(self.model_runner)
        self._tandem_copied = CopiedModel(self.model_runner.get_model())
        use_prompt_hook(self.model_runner, self._tandem_scorer.after_step)

    def tandem_begin_scores(self, key: str, scoring: PromptScoring, *, prompt: list[int]) -> None:
        self._tandem_scorer.begin_scoring(key, scoring, prompt=prompt)

    def tandem_take_scores(self, key: str) -> PromptScores:
        return self._tandem_scorer.take_scores(key)

    def tandem_discard_scores(self, key: str) -> None:
        self._tandem_scorer.discard(key)

    def tandem_load(self, directory: str) -> set[str]:
        """Load a directory of safetensors in place. Returns the parameters without a value."""
        stored = read_tensors(Path(directory))
        threads = staging_threads(self.model_runner.device.type, workers=self._tandem_workers)
        with staged(stored, threads=threads) as tensors:
            return self.tandem_put(tensors)

    def tandem_load_handoff(self, handoff: common_pb2.Handoff) -> set[str]:
        """Like `tandem_load`, from a trainer's memory."""
        return self.tandem_put(open_handoff(handoff))

    def tandem_put(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load tensors in place. Returns the parameters without a value."""
        forget_packed_experts(self.model_runner)
        return load_in_place(self.model_runner, tensors, self._tandem_copied)

    @property
    def _tandem_workers(self) -> int:
        workers: int = self.model_runner.parallel_config.world_size
        return workers

    def tandem_weight_sums(self) -> dict[str, int]:
        model, dtype = self.model_runner.get_model(), self.model_runner.model_config.dtype
        sums, seen = {}, set()
        for prefix, layer in model.named_modules():
            for own, parameter in layer.named_parameters(prefix, recurse=False):
                if parameter in seen or not parameter.is_floating_point():
                    continue
                seen.add(parameter)
                for part, value in parts_of_worker(layer, parameter).items():
                    sums[f"{own}{part}"] = sum_of(value, dtype, name=own)
        return sums

    def tandem_adapter_sums(self, number: int, directory: str) -> AdapterSums:
        return adapter_sums(adapters_in(self.model_runner), number, Path(directory))

    def tandem_use_adapter(self, ids: list[str], adapter: LoRARequest) -> None:
        use_adapter_in(self.model_runner, ids, adapter)

    def tandem_free_pinned(self) -> None:
        """Free memory that only loads need, and what they knew of dropped weights."""
        self._tandem_copied = CopiedModel(self.model_runner.get_model())
        torch._C._host_emptyCache()  # torch 2.11, which vLLM 0.26 needs, has no public name for it

    def tandem_cpu_sleep(self, *, drop: bool) -> None:
        """Give back the KV cache's memory, and the weights' with `drop`. The cache then reads as
        zeros."""
        release_pages(self.model_runner.kv_caches)
        if drop:
            drop_weights(self.model_runner.get_model())
            self._tandem_copied = CopiedModel(self.model_runner.get_model())
        trim_heap()

    def tandem_memory(self) -> EngineMemory:
        if self.model_runner.device.type == "cpu":
            return EngineMemory(device=resident_bytes(), host=0)
        from vllm.device_allocator.cumem import CuMemAllocator

        free, total = torch.cuda.mem_get_info()
        allocations = CuMemAllocator.get_instance().pointer_to_data.values()
        backups = [each.cpu_backup_tensor for each in allocations]
        return EngineMemory(
            device=total - free, host=sum(each.nbytes for each in backups if each is not None)
        )
