"""Masked importance sampling, by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_service.losses.base import Setting, Settings
from trainer_service.losses.corrections.base import Correction, Mismatch
from trainer_service.losses.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


def masked(log_rho: Tensor, *, low: float, high: float) -> Tensor:
    """ρ·1[low ≤ ρ ≤ high], from log ρ."""
    rho = log_rho.exp()
    return rho * ((rho >= low) & (rho <= high))


def mis(mismatch: Mismatch, settings: Settings, layout: Layout) -> Tensor:
    """w = ρ·1[low ≤ ρ ≤ high], ρ = exp(old - mu) of the token.

    Li et al., "When speed kills stability: demystifying RL collapse from the
    training-inference mismatch" (yingru.notion.site).
    """
    low, high = settings.number("mis_low"), settings.number("mis_high")
    return mismatch.factor(masked(mismatch.log_rho, low=low, high=high), mismatch.log_rho)


MIS = Correction(
    name="mis",
    weight=mis,
    settings=(
        Setting("mis_low", 0.5, "lower bound of ρ in `mis`", low=0.0),
        Setting("mis_high", 2.0, "upper bound of ρ in `mis`", low=0.0, above=True),
    ),
)
