"""IPO: preferences without the assumption that a reward explains them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer_service.losses.base import DatumLayout, LossResult, LossSettings
from trainer_service.losses.preference import pair_loss, pair_result, pairs

if TYPE_CHECKING:
    from torch import Tensor


def ipo(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: LossSettings, layout: DatumLayout
) -> LossResult:
    """Σ (c - r - 1/(2β))² over pairs, with c and r = Σ w·(p - ref) of the chosen and the rejected.

    Datum 2i of a request is chosen over datum 2i + 1. Azar et al., arXiv 2310.12036, with sums over
    tokens. Weights of 1/length give means over tokens."""
    chosen, rejected = pairs(logprobs, inputs, layout)
    values = (chosen - rejected - 1 / (2 * settings.number("beta"))).square()
    return pair_result(values, chosen=chosen, rejected=rejected, settings=settings, layout=layout)


LOSS = pair_loss("ipo", ipo)
