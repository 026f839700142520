"""A vLLM worker that forgets parts on demand. It stages loads as on a GPU."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch

from sampler_service.vllm import worker_extension
from sampler_service.vllm.adapter_internals import adapters_in
from sampler_service.vllm.adapter_sums import AdapterSums
from sampler_service.vllm.worker_extension import WeightsExtension

worker_extension.staging_threads = lambda device, workers: workers
worker_extension.staged = partial(
    worker_extension.staged, allocate=partial(torch.empty, dtype=torch.uint8)
)


class ForgetfulExtension(WeightsExtension):
    """While the file `FORGETFUL` exists, worker 1 loads no weights and no adapters."""

    rank: int

    @property
    def tandem_forgets(self) -> bool:
        return self.rank == 1 and Path(os.environ["FORGETFUL"]).exists()

    def tandem_load(self, directory: str) -> set[str]:
        return set() if self.tandem_forgets else super().tandem_load(directory)

    def tandem_adapter_sums(self, number: int, directory: str) -> AdapterSums:
        manager = adapters_in(self.model_runner)
        if self.tandem_forgets:
            for layer in manager.modules.values():
                layer.reset_lora(manager.lora_index_to_id.index(number))
        return super().tandem_adapter_sums(number, directory)
