"""DRO: direct reward optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer_service.losses.base import (
    AGGREGATION_SETTINGS,
    DatumLayout,
    Input,
    Loss,
    LossResult,
    LossSettings,
    Setting,
    check_aggregation,
)
from trainer_service.losses.policy import (
    ADVANTAGES,
    KL_INPUTS,
    KL_SETTINGS,
    LOGPROBS,
    POLICY_MAXIMA,
    POLICY_SUMS,
    finish,
    policy_metrics,
    ready,
)

if TYPE_CHECKING:
    from torch import Tensor


def dro(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: LossSettings, layout: DatumLayout
) -> LossResult:
    """-Σ (p·A - β/2·(p - q)²), per token, q the sampler's log probability. All [E].

    Richemond et al., arXiv 2405.19107, per token as in the Tinker documentation (β = 0.05). The
    penalty acts on every token, also where A = 0. Without `mask`, prompt tokens need the sampler's
    logprobs too."""
    tokens = ready(logprobs, inputs, acts_everywhere=True)
    distance = logprobs - tokens.sampler
    values = settings.number("beta") / 2 * distance.square() - logprobs * tokens.advantages
    return finish(tokens, values, inputs, settings, layout)


LOSS = Loss(
    name="dro",
    compute=dro,
    inputs=(
        LOGPROBS,
        ADVANTAGES,
        Input("mask", "0 for tokens that do not count. Without it, all do"),
        *KL_INPUTS,
    ),
    settings=(
        Setting("beta", 0.05, "β, weight of the penalty for leaving the sampler", low=0.0),
        *AGGREGATION_SETTINGS,
        *KL_SETTINGS,
    ),
    check=check_aggregation,
    by_entry=lambda settings: True,
    sum_names=POLICY_SUMS,
    max_names=POLICY_MAXIMA,
    metrics=policy_metrics,
)
