"""Cross-entropy, weighted and summed: supervised learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer_service.losses.base import Input, Loss, LossResult, Settings
from trainer_service.losses.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


def cross_entropy(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Settings, layout: Layout
) -> LossResult:
    """-Σ w·p, where p is the log probability of the target token and w its weight.

    `logprobs` and `weights` are [E]: one entry for each of a datum's [N] or [N, K] targets.
    The SDK's custom losses send w = -dC/dp through here, so weights may be of either sign.
    """
    weights = inputs["weights"]
    return LossResult(loss=-(weights * logprobs).sum(), sums=(weights.sum(),))


CROSS_ENTROPY = Loss(
    name="cross_entropy",
    compute=cross_entropy,
    inputs=(Input("weights", "w", default=1.0),),
    active="weights",
    wide=True,
    sum_names=("weights",),
    metrics=lambda sums: {"weights:sum": sums["weights"]},
)
