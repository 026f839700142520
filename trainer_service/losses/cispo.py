"""CISPO: clipped importance weights, unclipped gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

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


def cispo(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Settings, layout: Layout
) -> LossResult:
    """-Σ sg(clamp(r, low, high))·p·A with r = exp(p - q), sg stopping the gradient. All [E].

    Every token keeps its gradient; the clamp bounds its weight alone (MiniMax-M1, arXiv
    2506.13585). The default bounds on the ratio, 0 and 4, are those of the Tinker protocol.
    """
    advantages = inputs["advantages"]
    log_ratio = logprobs - inputs["logprobs"]
    ratio = log_ratio.detach().exp()
    bounded = ratio.clamp(
        settings.number("clip_low_threshold"), settings.number("clip_high_threshold")
    )
    return LossResult(
        loss=-(bounded * logprobs * advantages).sum(),
        sums=policy_sums(log_ratio=log_ratio, advantages=advantages, clipped=bounded != ratio),
    )


CISPO = Loss(
    name="cispo",
    compute=cispo,
    inputs=POLICY_INPUTS,
    active="advantages",
    settings=(
        Setting("clip_low_threshold", 0.0, "lower bound of the ratio"),
        Setting("clip_high_threshold", 4.0, "upper bound of the ratio"),
    ),
    sum_names=CLIPPED_POLICY_SUMS,
    metrics=policy_metrics,
)
