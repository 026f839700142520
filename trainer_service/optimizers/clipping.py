"""The global norm of the gradients, over all ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tandem.errors import GradientsNotFinite

if TYPE_CHECKING:
    from torch import Tensor


def clip(
    parameters: Iterable[nn.Parameter],
    *,
    limit: float,
    sum_over_ranks: Callable[[Tensor], None],
) -> float:
    """The norm before clipping; where it is above `limit`, gradients are scaled to it. A limit
    of 0 or less turns clipping off.

    Raises `GradientsNotFinite` on all ranks alike; the caller drops the gradients.
    """
    gradients = [local(each.grad) for each in parameters if each.grad is not None]
    norm = _global_norm(gradients, sum_over_ranks)
    if not math.isfinite(norm):
        raise GradientsNotFinite(
            f"the norm of the gradients is {norm}; they were dropped and the weights are "
            "unchanged. Look for extreme advantages, weights or learning rates"
        )
    if 0 < limit < norm:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
    return norm


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _global_norm(gradients: list[Tensor], sum_over_ranks: Callable[[Tensor], None]) -> float:
    if not gradients:
        return 0.0
    total = torch.nn.utils.get_total_norm(gradients).double().square()
    sum_over_ranks(total)
    return math.sqrt(total.item()) if math.isfinite(total.item()) else float(total.item())
