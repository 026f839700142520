"""Truncated importance sampling, by sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_service.losses.base import Setting, Settings
from trainer_service.losses.corrections.base import Correction, Mismatch
from trainer_service.losses.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


def seq_tis(mismatch: Mismatch, settings: Settings, layout: Layout) -> Tensor:
    """w = min(∏ ρ, C), the product over the datum's active tokens.

    Li et al., "When speed kills stability: demystifying RL collapse from the
    training-inference mismatch" (yingru.notion.site).
    """
    log_rho = mismatch.sequence_log_rho(layout)
    return mismatch.factor(log_rho.exp().clamp(max=settings.number("seq_tis_cap")), log_rho)


SEQ_TIS = Correction(
    name="seq_tis",
    weight=seq_tis,
    settings=(Setting("seq_tis_cap", 2.0, "C of `seq_tis`", low=0.0, above=True),),
)
