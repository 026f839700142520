"""LoRA arithmetic on a CPU: one matrix product per adapter for all of its rows.

vLLM's own (0.32, `lora/ops/torch_ops`) copies the adapter's matrices for every token, so that its
memory traffic grows with tokens x rank x width. It also reads index -1, which means no adapter, as
the last slot: with every slot taken, requests for the base model would use some adapter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

MIN_ROWS = 4
"""From this many rows on, a row of a float32 product does not depend, bit by bit, on the number of
rows (measured: MKL, inputs 32 to 4864, outputs 8 to 151936)."""


@dataclass(frozen=True)
class Group:
    """The rows that use one adapter slot. `rows` None means all rows."""

    slot: int
    rows: torch.Tensor | None

    def add(
        self, y: torch.Tensor, x: torch.Tensor, matrices: tuple[torch.Tensor, ...], scale: float
    ) -> None:
        """Add scale · matrices[-1] · … · matrices[0] · x[rows] to y[rows].

        `x` is [all rows, in], `y` [all rows, out], each of `matrices` [slots, 1, out, in].
        """
        value = x if self.rows is None else x.index_select(0, self.rows)
        count = value.shape[0]
        if count < MIN_ROWS:
            padded = value.new_zeros((MIN_ROWS, value.shape[1]))
            padded[:count] = value
            value = padded
        for matrix in matrices:
            value = torch.nn.functional.linear(value.to(matrix.dtype), matrix[self.slot, 0])
        value = value[:count].to(y.dtype)
        if scale != 1.0:
            value = value * scale
        if self.rows is None:
            y += value
        else:
            y.index_add_(0, self.rows, value)


def grouped(slots: torch.Tensor) -> tuple[Group, ...]:
    """Group rows by `slots` [rows], each a slot's number or -1 for none."""
    found = [int(slot) for slot in torch.unique(slots) if slot >= 0]
    if len(found) == 1 and bool((slots == found[0]).all()):
        return (Group(found[0], None),)
    return tuple(Group(slot, (slots == slot).nonzero()[:, 0]) for slot in found)


class GroupedAdapters(PunicaWrapperCPU):  # type: ignore[misc]
    """Replaces the arithmetic of an existing `PunicaWrapperCPU` (`install`)."""

    _of_tokens: tuple[Group, ...] = ()
    _of_samples: tuple[Group, ...] = ()

    @classmethod
    def install(cls, wrapper: PunicaWrapperCPU) -> None:
        """Change the wrapper's class in place: every layer holds a reference to it."""
        wrapper.__class__ = cls

    def update_metadata(
        self,
        mapping: LoRAMapping,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: object,
    ) -> None:
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        self._of_tokens = grouped(self.token_lora_indices)
        self._of_samples = grouped(self.sampler_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: object,
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for group in self._of_tokens:
            begin = 0
            for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                group.add(y[:, begin : begin + size], x, (a, b), scale)
                begin += size

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: object,
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for group in self._of_samples:
            group.add(y[:, : lora_b_stacked.shape[-2]], x, (lora_a_stacked, lora_b_stacked), scale)
