"""The arithmetic of adapters on a CPU: rows of one adapter together, one product for all of them.

vLLM's own (0.32, `lora/ops/torch_ops`) copies the adapter's matrices once for each token, so
that its cost grows with tokens x rank x width in memory traffic, and takes index -1, which
means a row without an adapter, for the last slot: with every slot taken, the base model's
requests would be computed with a stranger's adapter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

MIN_ROWS = 4
"""From so many rows on, each row of a float32 product is the same bit by bit, however many
there are (measured: MKL, inputs 32 to 4864, outputs 8 to 151936)."""


@dataclass(frozen=True)
class Group:
    """The rows of one slot. `rows` None: all there are."""

    slot: int
    rows: torch.Tensor | None

    def add(
        self, y: torch.Tensor, x: torch.Tensor, matrices: tuple[torch.Tensor, ...], scale: float
    ) -> None:
        """y[rows] += scale · matrices[-1] · … · matrices[0] · x[rows], with the slot's matrices.

        `x` is [all rows, in], `y` [all rows, out], a matrix [slots, 1, out, in].
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
    """The groups of `slots` [rows], each a slot's number or -1 for none."""
    found = [int(slot) for slot in torch.unique(slots) if slot >= 0]
    if len(found) == 1 and bool((slots == found[0]).all()):
        return (Group(found[0], None),)
    return tuple(Group(slot, (slots == slot).nonzero()[:, 0]) for slot in found)


class GroupedAdapters(PunicaWrapperCPU):  # type: ignore[misc]
    """Takes the place of a `PunicaWrapperCPU` that exists (`take_over`)."""

    _of_tokens: tuple[Group, ...] = ()
    _of_samples: tuple[Group, ...] = ()

    @classmethod
    def take_over(cls, wrapper: PunicaWrapperCPU) -> None:
        """Every layer holds the wrapper, so it changes its class and not its identity."""
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

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **kwargs: object,
    ) -> None:
        assert add_inputs
        for group in self._of_tokens:
            group.add(y, x, (lora_b_stacked,), 1.0)
