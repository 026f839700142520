"""Masked importance sampling, by sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_service.losses.base import Setting, Settings
from trainer_service.losses.corrections.base import Correction, Mismatch
from trainer_service.losses.corrections.mis import masked
from trainer_service.losses.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


def seq_mis(mismatch: Mismatch, settings: Settings, layout: Layout) -> Tensor:
    """w = P·1[low ≤ P ≤ high], P = ∏ ρ over the datum's active tokens.

    Li et al., "When speed kills stability: demystifying RL collapse from the
    training-inference mismatch" (yingru.notion.site).
    """
    log_rho = mismatch.sequence_log_rho(layout)
    low, high = settings.number("seq_mis_low"), settings.number("seq_mis_high")
    return mismatch.factor(masked(log_rho, low=low, high=high), log_rho)


SEQ_MIS = Correction(
    name="seq_mis",
    weight=seq_mis,
    settings=(
        Setting("seq_mis_low", 0.5, "lower bound of ∏ρ in `seq_mis`", low=0.0),
        Setting("seq_mis_high", 2.0, "upper bound of ∏ρ in `seq_mis`", low=0.0, above=True),
    ),
)
