"""The adapters of one run, whole on every rank of its trainer.

Each rank has gradients of its own part of the batch, summed once per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from tandem.protocol.worker import LoraSpec
from tandem.weights.adapter_files import key_of
from trainer_service.lora.adapters import Adapter, new_adapters, target_names

if TYPE_CHECKING:
    from torch import Tensor


class RunAdapters:
    """Newly drawn adapters for a `LoraSpec`, `by_module`. `targets` are PEFT's names of their
    modules."""

    def __init__(
        self, model: nn.Module, lora: LoraSpec | None, *, device: torch.device | str
    ) -> None:
        """Raises `UnsuitableLora`."""
        self.by_module: Mapping[str, Adapter] = {}
        if lora is not None:
            self.by_module = new_adapters(model, lora, device=device)
        names = [name for name, _ in model.named_modules()]
        self.targets: Sequence[str] = target_names(list(self.by_module), all_modules=names)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Example of a name: `model.layers.0.mlp.up_proj.lora_A`."""
        return {
            f"{name}.lora_{side}": parameter
            for name, adapter in self.by_module.items()
            for side, parameter in (("A", adapter.lora_A), ("B", adapter.lora_B))
        }

    def files(self) -> dict[str, Tensor]:
        return {
            key_of(name, side=side): parameter.detach()
            for name, adapter in self.by_module.items()
            for side, parameter in (("A", adapter.lora_A), ("B", adapter.lora_B))
        }

    def sum_gradients(self) -> None:
        """Sum the gradients over all ranks, in one collective.

        A gradient missing on some ranks counts as zero there. One missing on all ranks stays
        absent."""
        parameters = list(self.parameters().values())
        if not parameters:
            return
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        held = torch.tensor([float(each.grad is not None) for each in parameters])
        flat = torch.cat([*(part.flatten() for part in parts), held.to(parts[0].device)])
        dist.all_reduce(flat)
        *sums, ranks = flat.split([*(part.numel() for part in parts), len(parts)])
        for parameter, total, held_by in zip(parameters, sums, ranks.tolist(), strict=True):
            parameter.grad = total.view_as(parameter) if held_by else None
