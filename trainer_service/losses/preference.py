"""Shared parts of the preference losses: a datum's gain in log probability over the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from trainer_service.losses.base import (
    Compute,
    DatumLayout,
    Input,
    Loss,
    LossResult,
    LossSettings,
    Setting,
)

if TYPE_CHECKING:
    from torch import Tensor

PREFERENCE_INPUTS = (
    Input(
        "ref_logprobs", "log probability of the target under the reference policy", required=True
    ),
    Input("weights", "weight of the target in its datum's sum: 0 for the prompt", default=1.0),
)
BETA = Setting("beta", 0.1, "β, the penalty for leaving the reference", low=0.0, above=True)
PREFERENCE_AGGREGATION = Setting(
    "aggregation", "sum", "over the comparisons of the request", choices=("sum", "mean")
)
PAIR_SUMS = ("pairs", "correct", "margin", "chosen", "rejected")


def gains(logprobs: Tensor, inputs: Mapping[str, Tensor], layout: DatumLayout) -> Tensor:
    """Σ w·(p - ref) of each datum: [datums]."""
    return layout.datum_sums(inputs["weights"] * (logprobs - inputs["ref_logprobs"]))


def pairs(
    logprobs: Tensor, inputs: Mapping[str, Tensor], layout: DatumLayout
) -> tuple[Tensor, Tensor]:
    """The gains of the chosen (even) and of the rejected (odd) datums: [pairs] each."""
    both = gains(logprobs, inputs, layout)
    return both[0::2], both[1::2]


def pair_result(
    values: Tensor, *, chosen: Tensor, rejected: Tensor, settings: LossSettings, layout: DatumLayout
) -> LossResult:
    """Reduce the losses `values` [pairs] to one number, with statistics of β times the gains."""
    loss = values.sum()
    if settings.text("aggregation") == "mean":
        loss = loss / (layout.totals.datums // 2)
    with torch.no_grad():
        beta = settings.number("beta")
        margin = beta * (chosen - rejected)
        return LossResult(
            loss=loss,
            sums=(
                margin.new_tensor(len(margin)),
                (margin > 0).to(margin.dtype).sum(),
                margin.sum(),
                beta * chosen.sum(),
                beta * rejected.sum(),
            ),
        )


def pair_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    pairs = max(sums["pairs"], 1.0)
    return {
        "pairs:sum": sums["pairs"],
        "accuracy:mean": sums["correct"] / pairs,
        "margin:mean": sums["margin"] / pairs,
        "chosen_reward:mean": sums["chosen"] / pairs,
        "rejected_reward:mean": sums["rejected"] / pairs,
    }


def pair_loss(name: str, compute: Compute) -> Loss:
    """Return a loss of pairs of datums, each a chosen and a rejected one."""
    return Loss(
        name=name,
        compute=compute,
        inputs=PREFERENCE_INPUTS,
        settings=(BETA, PREFERENCE_AGGREGATION),
        active="weights",
        group=2,
        sum_names=PAIR_SUMS,
        metrics=pair_metrics,
    )
