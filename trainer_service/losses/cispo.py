"""CISPO: clipped importance weights, unclipped gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from trainer_service.losses.base import DatumLayout, LossResult, LossSettings
from trainer_service.losses.policy import (
    BOUND_INPUTS,
    POLICY_INPUTS,
    bound_settings,
    clip_bounds,
    finish,
    policy_loss,
    ready,
)

if TYPE_CHECKING:
    from torch import Tensor


def cispo(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: LossSettings, layout: DatumLayout
) -> LossResult:
    """-Σ sg(clamp(r, low, high))·p·A with r = exp(p - old), sg stopping the gradient. All [E].

    Every token keeps its gradient. The clamp bounds only its weight (MiniMax-M1, arXiv 2506.13585).
    The default bounds of the ratio, 0 and 4, are those of the Tinker protocol."""
    tokens = ready(logprobs, inputs)
    low, high = clip_bounds(inputs, settings, like=logprobs)
    ratio = tokens.ratio.detach()
    bounded = torch.minimum(torch.maximum(ratio, low), high)
    values = -bounded * logprobs * tokens.advantages
    return finish(tokens, values, inputs, settings, layout, clipped=bounded != ratio)


LOSS = policy_loss(
    "cispo",
    cispo,
    inputs=(*POLICY_INPUTS, *BOUND_INPUTS),
    settings=bound_settings(0.0, 4.0),
    clips=True,
)
