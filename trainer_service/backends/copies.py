"""A model whose parameters are copies, in the type that it computes in, of float32 weights that are
trained: what FSDP casts anew for each micro-batch is then copied once for each step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor


class CopiedWeights:
    """`masters` are float32 weights by the names of the model's parameters, which become copies in
    `dtype`. Each gradient that a backward pass makes of a copy is added to its master's at once, in
    float32: so does FSDP, and to the same bits.

    The copies stay the same objects. They take as much memory besides as the model in `dtype`.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype) -> None:
        self.masters: dict[str, nn.Parameter] = {}
        self._copies: list[Tensor] = []
        for name, parameter in model.named_parameters():
            master = nn.Parameter(parameter.data.float())  # the same memory, if it is float32
            parameter.data = master.data.to(dtype)
            parameter.register_post_accumulate_grad_hook(functools.partial(_move, master))
            self.masters[name] = master
            self._copies.append(parameter.data)

    def refresh(self) -> None:
        """Copies the masters, which have changed."""
        with torch.no_grad():
            torch._foreach_copy_(self._copies, list(self.masters.values()))


def _move(master: nn.Parameter, parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad.add_(gradient)
