"""GSPO: one ratio per sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from trainer_service.losses.base import DatumLayout, Input, LossResult, LossSettings
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


def gspo(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: LossSettings, layout: DatumLayout
) -> LossResult:
    """-Σ min(s·A, clamp(s, low, high)·A), s = exp(mean of p - old over a datum's tokens). All [E].

    `sequence_ratio_mask` weighs the mean, by default over the active tokens. Each token's s is
    sg(s)·p/sg(p) in probabilities, so its gradient is s times that of its own log probability. This
    is GSPO-token, arXiv 2507.18071, with its bounds 1 - 3e-4 and 1 + 4e-4 as the defaults."""
    tokens = ready(logprobs, inputs)
    advantages = tokens.advantages
    low, high = clip_bounds(inputs, settings, like=logprobs)
    weights = tokens.active
    if "sequence_ratio_mask" in inputs:  # a dropped token says nothing about its sequence
        weights = inputs["sequence_ratio_mask"] * torch.isfinite(inputs["logprobs"])
    sequence = layout.datum_means(tokens.log_ratio.detach(), weights).exp()[layout.datum]
    ratio = sequence * (logprobs - logprobs.detach()).exp()
    free = ratio * advantages
    held = torch.minimum(torch.maximum(ratio, low), high) * advantages
    values = -torch.minimum(free, held)
    return finish(tokens, values, inputs, settings, layout, ratio=sequence, clipped=held < free)


LOSS = policy_loss(
    "gspo",
    gspo,
    inputs=(
        *POLICY_INPUTS,
        *BOUND_INPUTS,
        Input("sequence_ratio_mask", "weight of each token in its sequence's mean log ratio"),
    ),
    settings=bound_settings(1 - 3e-4, 1 + 4e-4),
    clips=True,
    by_entry=lambda settings: False,  # a token counts by its whole sequence
)
