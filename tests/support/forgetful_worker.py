"""A worker of vLLM's that leaves out what it is told to leave out, for engines of several."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from sampler_service.vllm.adapter_sums import AdapterSums
from sampler_service.vllm.internals import adapters_in
from sampler_service.vllm.worker_extension import WeightsExtension
from tandem.weights.delta import Bytes


class ForgetfulExtension(WeightsExtension):
    """Worker 1 forgets to load, or to take an adapter in, while the file `FORGETFUL` is there."""

    rank: int

    @property
    def tandem_forgets(self) -> bool:
        return self.rank == 1 and Path(os.environ["FORGETFUL"]).exists()

    def tandem_load(self, directory: str, made: Mapping[str, Bytes]) -> set[str]:
        return set() if self.tandem_forgets else super().tandem_load(directory, made)

    def tandem_adapter_sums(self, number: int, directory: str) -> AdapterSums:
        manager = adapters_in(self.model_runner)
        if self.tandem_forgets:
            for layer in manager.modules.values():
                layer.reset_lora(manager.lora_index_to_id.index(number))
        return super().tandem_adapter_sums(number, directory)
