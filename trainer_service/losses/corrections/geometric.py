"""Geometric rejection: sequences whose mean log ratio is too far from 0 are left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_service.losses.base import Setting, Settings
from trainer_service.losses.corrections.base import Correction, Mismatch
from trainer_service.losses.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


def geometric(mismatch: Mismatch, settings: Settings, layout: Layout) -> Tensor:
    """w = 1[low ≤ g ≤ high], g = exp(mean of log ρ over the datum's active tokens).

    The geometric mean does not grow with the length (verl, docs/algo/rollout_corr.md). The
    default bounds, 0.99 and 1.01, are ours: looser than verl's examples, which are for engines
    that agree with their trainer to four digits.
    """
    mean = layout.datum_means(mismatch.log_rho, mismatch.active)[layout.datum].exp()
    low, high = settings.number("geometric_low"), settings.number("geometric_high")
    return ((mean >= low) & (mean <= high)).to(mean.dtype)


GEOMETRIC = Correction(
    name="geometric",
    weight=geometric,
    settings=(
        Setting("geometric_low", 0.99, "lower bound of g in `geometric`", low=0.0),
        Setting("geometric_high", 1.01, "upper bound of g in `geometric`", low=0.0, above=True),
    ),
)
