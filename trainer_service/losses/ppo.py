"""PPO's clipped surrogate, with its asymmetric and its dual form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from tandem.errors import UnknownLossSetting
from trainer_service.losses.base import DatumLayout, LossResult, LossSettings, Setting
from trainer_service.losses.policy import (
    BOUND_INPUTS,
    POLICY_INPUTS,
    bound_settings,
    check_policy,
    clip_bounds,
    finish,
    policy_loss,
    ready,
)

if TYPE_CHECKING:
    from torch import Tensor


def ppo(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: LossSettings, layout: DatumLayout
) -> LossResult:
    """-Σ min(r·A, clamp(r, low, high)·A) with r = exp(p - old), per token. All [E].

    The thresholds bound the ratio itself. 0.8 and 1.2 are the paper's ε = 0.2 (Schulman et al.,
    arXiv 1707.06347). A larger upper bound is DAPO's "clip higher" (0.8 and 1.28, arXiv
    2503.14476). With `dual_clip` c above 1, the loss of a token with A < 0 is at most -c·A (dual
    clip, Ye et al., arXiv 1912.09729, which uses 3)."""
    tokens = ready(logprobs, inputs)
    advantages = tokens.advantages
    low, high = clip_bounds(inputs, settings, like=logprobs)
    free = tokens.ratio * advantages
    held = torch.minimum(torch.maximum(tokens.ratio, low), high) * advantages
    values, clipped = -torch.minimum(free, held), held < free
    most = settings.number("dual_clip")
    if most:
        ceiling = -most * advantages
        over = (advantages < 0) & (values > ceiling)
        values, clipped = torch.where(over, ceiling, values), clipped | over
    return finish(tokens, values, inputs, settings, layout, clipped=clipped)


def _check(settings: LossSettings) -> None:
    check_policy(settings)
    if 0 < settings.number("dual_clip") <= 1:
        raise UnknownLossSetting(
            "dual_clip bounds the ratio of tokens with a negative advantage: it must be above 1, "
            "or 0 to turn it off"
        )


LOSS = policy_loss(
    "ppo",
    ppo,
    inputs=(*POLICY_INPUTS, *BOUND_INPUTS),
    settings=(
        *bound_settings(0.8, 1.2),
        Setting("dual_clip", 0.0, "c of the dual clip, above 1. 0 turns it off", low=0.0),
    ),
    clips=True,
    check=_check,
)
