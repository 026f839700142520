"""Importance-weighted policy gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer_service.losses.base import DatumLayout, Loss, LossResult, LossSettings
from trainer_service.losses.policy import (
    POLICY_MAXIMA,
    POLICY_SETTINGS,
    POLICY_SUMS,
    SAMPLER_INPUTS,
    by_entry,
    check_policy,
    finish,
    policy_metrics,
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


LOSS = Loss(
    name="importance_sampling",
    compute=importance_sampling,
    inputs=SAMPLER_INPUTS,
    settings=POLICY_SETTINGS,
    check=check_policy,
    by_entry=by_entry,
    active="advantages",
    sum_names=POLICY_SUMS,
    max_names=POLICY_MAXIMA,
    metrics=policy_metrics,
)
