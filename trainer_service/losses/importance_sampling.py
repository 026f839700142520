"""Importance-weighted policy gradient: REINFORCE with the sampler's policy corrected for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer_service.losses.base import Loss, LossResult, Settings
from trainer_service.losses.layout import Layout
from trainer_service.losses.policy import POLICY_INPUTS, POLICY_SUMS, policy_metrics, policy_sums

if TYPE_CHECKING:
    from torch import Tensor


def importance_sampling(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Settings, layout: Layout
) -> LossResult:
    """-Σ exp(p - q)·A, per token, with p the log probability now (`logprobs` argument), q that
    under the sampler (input `logprobs`) and A the advantage. All [E].

    Source: the Tinker documentation of losses; the estimator is that of off-policy policy
    gradients (Degris, White, Sutton, arXiv 1205.4839), per token.
    """
    advantages = inputs["advantages"]
    log_ratio = logprobs - inputs["logprobs"]
    return LossResult(
        loss=-(log_ratio.exp() * advantages).sum(),
        sums=policy_sums(log_ratio=log_ratio, advantages=advantages),
    )


IMPORTANCE_SAMPLING = Loss(
    name="importance_sampling",
    compute=importance_sampling,
    inputs=POLICY_INPUTS,
    active="advantages",
    sum_names=POLICY_SUMS,
    metrics=policy_metrics,
)
