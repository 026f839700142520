"""KTO: answers that are good or bad by themselves, not in pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from trainer_service.losses.base import DatumLayout, Input, Loss, LossResult, LossSettings, Setting
from trainer_service.losses.preference import (
    BETA,
    PREFERENCE_AGGREGATION,
    PREFERENCE_INPUTS,
    gains,
)

if TYPE_CHECKING:
    from torch import Tensor


def kto(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: LossSettings, layout: DatumLayout
) -> LossResult:
    """Σ λ⁺·(1 - σ(β·(g - z))) over good and Σ λ⁻·(1 - σ(β·(z - g))) over bad datums.

    g = Σ w·(p - ref) of the datum. `desirable` is above 0 for a good datum. The client estimates z
    = max(0, KL to the reference) and gives it as the input or the setting `z0`. Ethayarajh et al.,
    arXiv 2402.01306."""
    gain = gains(logprobs, inputs, layout)
    # A datum's number is repeated for its entries, so their mean is the number.
    good = layout.datum_means(inputs["desirable"], torch.ones_like(logprobs)) > 0
    zero = gain.new_full(gain.shape, settings.number("z0"))
    if "z0" in inputs:
        zero = layout.datum_means(inputs["z0"], torch.ones_like(logprobs))
    sign = good.to(gain.dtype) * 2 - 1
    weight = torch.where(
        good,
        gain.new_tensor(settings.number("desirable_weight")),
        gain.new_tensor(settings.number("undesirable_weight")),
    )
    values = weight * (1 - torch.sigmoid(settings.number("beta") * sign * (gain - zero)))
    loss = values.sum()
    if settings.text("aggregation") == "mean":
        loss = loss / layout.totals.datums
    with torch.no_grad():
        reward = settings.number("beta") * gain
        count = good.to(gain.dtype)
        return LossResult(
            loss=loss,
            sums=(
                count.sum(),
                (1 - count).sum(),
                (reward * count).sum(),
                (reward * (1 - count)).sum(),
            ),
        )


def _metrics(sums: Mapping[str, float]) -> dict[str, float]:
    return {
        "desirable:sum": sums["good"],
        "undesirable:sum": sums["bad"],
        "desirable_reward:sum": sums["good_reward"],
        "undesirable_reward:sum": sums["bad_reward"],
    }


LOSS = Loss(
    name="kto",
    compute=kto,
    inputs=(
        *PREFERENCE_INPUTS,
        Input("desirable", "above 0 for a good datum", shape="datum", required=True),
        Input("z0", "z of the datum, instead of the setting's", shape="datum", default="z0"),
    ),
    settings=(
        BETA,
        Setting("z0", 0.0, "z, the KL to the reference", low=0.0),
        Setting("desirable_weight", 1.0, "λ⁺", low=0.0),
        Setting("undesirable_weight", 1.0, "λ⁻", low=0.0),
        PREFERENCE_AGGREGATION,
    ),
    active="weights",
    sum_names=("good", "bad", "good_reward", "bad_reward"),
    metrics=_metrics,
)
