"""Truncated importance sampling, by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_service.losses.base import Setting, Settings
from trainer_service.losses.corrections.base import Correction, Mismatch
from trainer_service.losses.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


def tis(mismatch: Mismatch, settings: Settings, layout: Layout) -> Tensor:
    """w = min(ρ, C), ρ = exp(old - mu) of the token.

    Yao et al., "Your efficient RL framework secretly brings you off-policy RL training"
    (fengyao.notion.site/off-policy-rl); truncation as in Retrace, arXiv 1606.02647.
    """
    weight = mismatch.log_rho.exp().clamp(max=settings.number("tis_cap"))
    return mismatch.factor(weight, mismatch.log_rho)


TIS = Correction(
    name="tis",
    weight=tis,
    settings=(Setting("tis_cap", 2.0, "C of `tis`", low=0.0, above=True),),
)
