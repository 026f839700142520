"""IcePop: tokens on which trainer and engine disagree too much are left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_service.losses.base import Setting, Settings
from trainer_service.losses.corrections.base import Correction, Mismatch
from trainer_service.losses.corrections.mis import masked
from trainer_service.losses.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


def icepop(mismatch: Mismatch, settings: Settings, layout: Layout) -> Tensor:
    """w = ρ·1[α ≤ ρ ≤ β], ρ = exp(old - mu) of the token.

    The function of `mis` with the bounds of its authors, 0.5 and 5 (Ling team, "Every step
    evolves", arXiv 2510.18855; ringtech.notion.site/icepop).
    """
    low, high = settings.number("icepop_low"), settings.number("icepop_high")
    return mismatch.factor(masked(mismatch.log_rho, low=low, high=high), mismatch.log_rho)


ICEPOP = Correction(
    name="icepop",
    weight=icepop,
    settings=(
        Setting("icepop_low", 0.5, "α of `icepop`", low=0.0),
        Setting("icepop_high", 5.0, "β of `icepop`", low=0.0, above=True),
    ),
)
