"""What the policy-gradient losses share: the probability ratio and its cheap statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from trainer_service.losses.base import Input

if TYPE_CHECKING:
    from torch import Tensor

POLICY_INPUTS = (
    Input("logprobs", "log probability under the sampler", required=True),
    Input("advantages", "A", required=True),
)
POLICY_SUMS = ("active", "ratio", "kl")
CLIPPED_POLICY_SUMS = (*POLICY_SUMS, "clipped")


def policy_sums(
    *, log_ratio: Tensor, advantages: Tensor, clipped: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Sums over the tokens that act, which are those with an advantage: their number, their
    ratio p/q, and q's estimate of KL(q, p), which is -log ratio ("k1", Schulman,
    joschu.net/blog/kl-approx). Prompt tokens come with advantage 0 and say nothing. All [E].
    """
    with torch.no_grad():
        active = (advantages != 0).to(log_ratio.dtype)
        sums = (active.sum(), (log_ratio.exp() * active).sum(), -(log_ratio * active).sum())
        if clipped is None:
            return sums
        return (*sums, (clipped.to(log_ratio.dtype) * active).sum())


def policy_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Where no token acts the policy is taken not to have moved: ratio 1, KL 0."""
    active = sums["active"]
    metrics = {
        "active_tokens:sum": active,
        "ratio:mean": sums["ratio"] / active if active else 1.0,
        "kl:mean": sums["kl"] / active if active else 0.0,
    }
    if "clipped" in sums:
        metrics["clipped:mean"] = sums["clipped"] / active if active else 0.0
    return metrics
