"""PPO's clipped surrogate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from trainer_service.losses.base import Loss, LossResult, Setting, Settings
from trainer_service.losses.layout import Layout
from trainer_service.losses.policy import (
    CLIPPED_POLICY_SUMS,
    POLICY_INPUTS,
    policy_metrics,
    policy_sums,
)

if TYPE_CHECKING:
    from torch import Tensor


def ppo(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Settings, layout: Layout
) -> LossResult:
    """-Σ min(r·A, clamp(r, low, high)·A) with r = exp(p - q), per token. All [E].

    `clip_low_threshold` and `clip_high_threshold` bound the ratio itself: 0.8 and 1.2 are the
    ε = 0.2 of the paper (Schulman et al., arXiv 1707.06347); a higher bound above is DAPO's
    "clip higher" (arXiv 2503.14476).
    """
    advantages = inputs["advantages"]
    log_ratio = logprobs - inputs["logprobs"]
    ratio = log_ratio.exp()
    bounded = ratio.clamp(
        settings.number("clip_low_threshold"), settings.number("clip_high_threshold")
    )
    free, held = ratio * advantages, bounded * advantages
    return LossResult(
        loss=-torch.minimum(free, held).sum(),
        sums=policy_sums(log_ratio=log_ratio, advantages=advantages, clipped=held < free),
    )


PPO = Loss(
    name="ppo",
    compute=ppo,
    inputs=POLICY_INPUTS,
    active="advantages",
    settings=(
        Setting("clip_low_threshold", 0.8, "lower bound of the ratio"),
        Setting("clip_high_threshold", 1.2, "upper bound of the ratio"),
    ),
    sum_names=CLIPPED_POLICY_SUMS,
    metrics=policy_metrics,
)
