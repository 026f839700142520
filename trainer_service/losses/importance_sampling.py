"""Importance-weighted policy gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer_service.losses.base import DatumLayout, LossResult, LossSettings
from trainer_service.losses.policy import (
    SAMPLER_INPUTS,
    finish,
    policy_loss,
    ready,
)

if TYPE_CHECKING:
    from torch import Tensor


def importance_sampling(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: LossSettings, layout: DatumLayout
) -> LossResult:
    """-Σ exp(p - q)·A, per token. All [E].

    p is the current log probability (argument `logprobs`), q the sampler's (input `logprobs`).
    Source: the Tinker documentation of losses, after Degris, White, Sutton, arXiv 1205.4839."""
    tokens = ready(logprobs, inputs)
    return finish(tokens, -tokens.ratio * tokens.advantages, inputs, settings, layout)


LOSS = policy_loss(
    "importance_sampling",
    importance_sampling,
    inputs=SAMPLER_INPUTS,
)
