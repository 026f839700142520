"""Copies of float32 weights in the model's dtype, made once per optimizer step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor


class CopiedWeights:
    """`masters` are float32 weights by parameter name. The model's parameters become copies in
    `dtype`.

    Each gradient of a copy is added to its master's immediately, in float32, like in FSDP, with
    equal bits."""

    def __init__(self, model: nn.Module, *, dtype: torch.dtype) -> None:
        self.masters: dict[str, nn.Parameter] = {}
        self._copies: list[Tensor] = []
        for name, parameter in model.named_parameters():
            master = nn.Parameter(parameter.data.float())  # shares memory if float32
            parameter.data = master.data.to(dtype)
            parameter.register_post_accumulate_grad_hook(functools.partial(_move, master))
            self.masters[name] = master
            self._copies.append(parameter.data)

    def refresh(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._copies, list(self.masters.values()))


def _move(master: nn.Parameter, parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad.add_(gradient)
