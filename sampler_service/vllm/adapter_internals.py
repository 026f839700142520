"""The part of `internals` for adapters: their layers in vLLM's model, and their manager.

vLLM adapts the output head only of some classes of models. All heads compute alike, so every head
gets an adapter layer here. Embeddings and experts get none, because the trainer does not adapt
them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sampler_service.vllm.internals import padded_linear
from tandem.weights.model_config import model_files
from tandem.weights.tensors import read_header

if TYPE_CHECKING:  # the version is checked before these imports
    import torch
    from vllm.config import VllmConfig
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # both runners share the used parts

HEAD = "lm_head"
"""The output head's name in an adapter, as vLLM renames it."""
_DECLARED: dict[str, object] = {
    "supports_lora": True,
    "lora_manager": None,
    "is_3d_moe_weight": False,
    "is_non_gated_moe": False,
    "packed_modules_mapping": {},
    "lora_skip_prefixes": [],
}
"""The class attributes that vLLM expects for adapters, besides `embedding_modules`."""


def adapt_heads(runner: GPUModelRunner) -> None:
    """Let the runner's next model have adapters of its output head."""
    load = runner.load_lora_model

    def load_with_head(
        model: torch.nn.Module, config: VllmConfig, device: torch.device
    ) -> torch.nn.Module:
        for name, value in _DECLARED.items():
            if not hasattr(model, name):
                setattr(model, name, value)
        model.embedding_modules = {}  # replaces vLLM's own list, which has some models' head
        model.packed_modules_mapping = {
            **model.packed_modules_mapping,
            **_whole_in_files(model, Path(config.model_config.model)),
        }
        adapted = load(model, config, device)
        _adapt_head(adapters_in(runner))
        return adapted

    runner.load_lora_model = load_with_head


def _whole_in_files(model: torch.nn.Module, directory: Path) -> dict[str, list[str]]:
    """Return layers that vLLM stacks, but that the files and adapters hold as one.

    vLLM's table is wrong for some models."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

    stacked = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, MergedColumnParallelLinear | QKVParallelLinear)
    }
    return {
        layer: [layer]
        for file in model_files(directory)
        for name in read_header(file)
        for layer in stacked.intersection(name.split(".")[-2:-1])
    }


def _adapt_head(manager: LoRAModelManager) -> None:
    from vllm.lora.layers import LogitsProcessorWithLoRA
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    class Head(LogitsProcessorWithLoRA):  # type: ignore[misc]
        """vLLM's layer without its limit of 258048 tokens, which no used kernel needs."""

        def create_lora_weights(self, slots: int) -> None:
            rank, dtype = manager.lora_config.max_lora_rank, manager.lora_config.lora_dtype
            width, vocabulary, device = self.hidden_size, self.base_layer.vocab_size, self.device
            order = self.sharded_to_full_mapping
            self.lora_a_stacked = torch.zeros(slots, 1, rank, width, dtype=dtype, device=device)
            self.lora_b_stacked = torch.zeros(
                slots, 1, vocabulary, rank, dtype=dtype, device=device
            )
            self.sharded_to_full_mapping_gpu = order and torch.tensor(order, device=device)

    import torch

    model = manager.model
    heads = [module for module in model.children() if isinstance(module, ParallelLMHead)]
    # Gemma 2 and Cohere compute logits with the embeddings.
    head = heads[0] if heads else model.model.embed_tokens
    order = head.get_sharded_to_full_mapping()
    layer = Head(
        model.logits_processor, head.embedding_dim, head.weight.dtype, head.weight.device, order
    )
    layer.create_lora_weights(manager.lora_slots)
    layer.set_mapping(manager._get_punica_wrapper(HEAD))
    model.logits_processor = layer
    manager.register_module(HEAD, layer)
    manager.supported_lora_modules.append(HEAD)


def leave_experts_plain() -> None:
    """Let a mixture of experts have adapters of its other layers.

    vLLM computes adapted experts only on a GPU."""
    from vllm.lora import model_manager
    from vllm.model_executor.layers.fused_moe import MoERunner, layer

    if hasattr(layer.FusedMoEConfig, "without_adapters"):
        return  # another engine of this process did it
    supported = model_manager.get_supported_lora_modules

    class PlainExperts(layer.FusedMoEConfig):  # type: ignore[misc]
        without_adapters = True

        def __post_init__(self) -> None:
            self.is_lora_enabled = False
            super().__post_init__()

    def without_experts(model: torch.nn.Module) -> list[str]:
        experts = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, MoERunner)
        }
        return [name for name in supported(model) if name not in experts]

    layer.FusedMoEConfig = PlainExperts
    model_manager.get_supported_lora_modules = without_experts


def multiply_by_slot() -> None:
    """On a CPU, multiply an adapter's matrices with all of its rows at once.

    vLLM copies the matrices for each row, and takes -1 (no adapter) for the last slot."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    def product(x: torch.Tensor, matrices: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[rows, in], [slots, 1, out, in] and [rows] → [rows, out]: zeros without an adapter."""
        y = x.new_zeros((x.shape[0], matrices.shape[-2]))
        for slot in slots.unique().tolist():
            if slot >= 0:
                rows, matrix = (slots == slot).nonzero()[:, 0], matrices[slot, 0]
                y[rows] = padded_linear(x[rows].to(matrix.dtype), matrix).to(y.dtype)
        return y

    def shrink(
        x: torch.Tensor, a: torch.Tensor, y: torch.Tensor, slots: torch.Tensor, scale: float
    ) -> None:
        y[:, : a.shape[-2]] = scale * product(x, a, slots)

    def expand(
        x: torch.Tensor, b: torch.Tensor, y: torch.Tensor, slots: torch.Tensor, add_inputs: bool
    ) -> None:
        expand_slice(x, b, y, slots, 0, b.shape[-2], add_inputs)

    def expand_slice(
        x: torch.Tensor,
        b: torch.Tensor,
        y: torch.Tensor,
        slots: torch.Tensor,
        begin: int,
        size: int,
        add_inputs: bool,
    ) -> None:
        assert add_inputs, "only embeddings of their own would not be added"
        y[:, begin : begin + size] += product(x, b, slots)

    for module in (lora_ops, punica_cpu):
        module.bgmv_shrink, module.bgmv_expand = shrink, expand
        module.bgmv_expand_slice = expand_slice


def adapters_in(runner: GPUModelRunner) -> LoRAModelManager:
    manager: LoRAModelManager = runner.lora_manager._adapter_manager
    return manager


@contextmanager
def head_of(runner: GPUModelRunner, adapter: int, *, rows: int) -> Iterator[None]:
    """Map `rows` rows at the output head to one adapter (0: none)."""
    if getattr(runner, "lora_manager", None) is None:
        yield
        return
    from vllm.lora.layers import LoRAMapping

    manager = adapters_in(runner)
    ids = (adapter,) * rows
    manager._set_adapter_mapping(
        LoRAMapping(index_mapping=ids, prompt_mapping=ids, is_prefill=True)
    )
    try:
        yield
    finally:
        manager._last_mapping = None  # the next step sets its own mapping
