"""Cross-entropy, weighted and summed: supervised learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from trainer_service.losses.base import (
    AGGREGATION_SETTINGS,
    DatumLayout,
    Input,
    Loss,
    LossResult,
    LossSettings,
    aggregate,
    check_aggregation,
)

if TYPE_CHECKING:
    from torch import Tensor


def cross_entropy(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: LossSettings, layout: DatumLayout
) -> LossResult:
    """-Σ w·p, where p is the log probability of the target token and w its weight.

    `logprobs` and `weights` are [E]: one entry for each of a datum's [N] or [N, K] targets. A loss
    C that the SDK differentiates on the client arrives as w = -dC/dp, so weights may be negative.
    `aggregation` "token_mean" is the mean over entries of nonzero weight."""
    weights = inputs["weights"]
    active = (weights != 0).to(logprobs.dtype)
    loss = aggregate(-(weights * logprobs), active, settings, layout)
    with torch.no_grad():
        surprise = -(weights * logprobs).sum()
        negative = (weights < 0).to(weights.dtype).sum()
        return LossResult(loss=loss, sums=(weights.sum(), surprise, negative))


LOSS = Loss(
    name="cross_entropy",
    compute=cross_entropy,
    inputs=(Input("weights", "weight w of the target", default=1.0),),
    settings=AGGREGATION_SETTINGS,
    check=check_aggregation,
    by_entry=lambda settings: True,
    active="weights",
    wide=True,
    sum_names=("weights", "surprise", "negative"),
    metrics=lambda sums: {"weights:sum": sums["weights"]},
)
