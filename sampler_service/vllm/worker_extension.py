"""Extends vLLM's worker: complete in-place loads, prompt scoring, sleep, and fixes for CPUs.

vLLM mixes `WeightsExtension` into its worker (`worker_extension_cls`), so `self.model_runner` is
vLLM's. Written against vLLM 0.32 (CPU) and 0.28 (CUDA). Three fixes are for CPUs:

- Linear layers keep a packed copy of their weight. A reload repacks the layers that it loads, but
  not an output head tied to the embeddings, which is not loaded by name.
- oneDNN's float32 kernel for a single row may sum in another order than that for several (seen from
  4864 inputs on), so that a sequence's logprobs would depend on what runs beside it. A single row
  is padded to two; from two on, a row's result does not depend on the others.
- Adapters are computed slowly, and wrongly when every slot is taken (`grouped_adapters.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from sampler_service.engine import EngineMemory
from sampler_service.vllm.memory import (
    drop_weights,
    dropped_layers,
    release_pages,
    resident_bytes,
    trim_heap,
)
from sampler_service.vllm.prompt_scoring import PromptScorer

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

MIN_ROWS = 2
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def read_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and value of every tensor in a directory's safetensors files."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield name, tensors.get_tensor(name)


class PaddedLinear:
    """Pads the inputs [rows, in] of a linear layer to at least `MIN_ROWS` rows."""

    def __init__(self, inner: Linear) -> None:
        self.inner = inner

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        rows = x.shape[0]
        if rows >= MIN_ROWS or x.dim() != 2:
            return self.inner(x, weight, bias)
        padded = x.new_zeros((MIN_ROWS, x.shape[1]))
        padded[:rows] = x
        return self.inner(padded, weight, bias)[:rows]


class WeightsExtension:
    """Methods for `collective_rpc`, prefixed `tandem_` because vLLM forbids clashes of names."""

    model_runner: GPUModelRunner

    def tandem_prepare(self) -> PromptScorer:
        """Called once, after the engine was made, in its process and thread."""
        torch.seed()  # vLLM's seed is 0: all engines would draw the same unseeded samples
        self._tandem_pad_linears()
        self._tandem_group_adapters()
        scorer = PromptScorer(self.model_runner)
        self.model_runner._get_prompt_logprobs_dict = scorer.after_step
        return scorer

    def tandem_load(self, directory: str) -> set[str]:
        """Load a directory of safetensors in place. Return the parameters that got no value."""
        model = self.model_runner.get_model()
        # A layer with adapters wraps the plain one as its `base_layer`.
        everything = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        loaded: set[str] = set()
        load_weights = model.load_weights

        def recording(weights: Iterator[tuple[str, torch.Tensor]]) -> set[str] | None:
            names = load_weights(weights)
            loaded.update(names or ())
            return names  # type: ignore[no-any-return]

        model.load_weights = recording
        try:
            self.model_runner.reload_weights(weights_iterator=read_tensors(Path(directory)))
        finally:
            del model.load_weights
        self._tandem_repack_heads()
        self._tandem_pad_linears()
        return (everything - loaded) | dropped_layers(model)

    def tandem_cpu_sleep(self, *, drop: bool) -> None:
        """Give the memory of the KV cache back, and drop the weights if told so. What the KV cache
        then holds is zeros."""
        release_pages(self.model_runner.kv_caches)
        if drop:
            drop_weights(self.model_runner.get_model())
        trim_heap()

    def tandem_memory(self) -> EngineMemory:
        """Measure the memory in use."""
        if self.model_runner.device.type == "cpu":
            return EngineMemory(device=resident_bytes(), host=0)
        from vllm.device_allocator.cumem import CuMemAllocator

        free, total = torch.cuda.mem_get_info()
        allocations = CuMemAllocator.get_instance().pointer_to_data.values()
        backups = [each.cpu_backup_tensor for each in allocations]
        return EngineMemory(
            device=total - free, host=sum(each.nbytes for each in backups if each is not None)
        )

    def _tandem_repack_heads(self) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    def _tandem_pad_linears(self) -> None:
        for module in self.model_runner.get_model().modules():
            inner = getattr(module, "cpu_linear", None)
            if inner is not None and not isinstance(inner, PaddedLinear):
                module.cpu_linear = PaddedLinear(inner)

    def _tandem_group_adapters(self) -> None:
        manager = getattr(self.model_runner, "lora_manager", None)
        if manager is None or self.model_runner.device.type != "cpu":
            return
        from sampler_service.vllm.grouped_adapters import GroupedAdapters

        for wrapper in manager._adapter_manager.punica_wrapper_mapping.values():
            GroupedAdapters.install(wrapper)
