"""Off-policy sequence mask: bad answers that the policy would no longer give teach nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_service.losses.base import Setting, Settings
from trainer_service.losses.corrections.base import Correction, Mismatch
from trainer_service.losses.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


def off_policy_mask(mismatch: Mismatch, settings: Settings, layout: Layout) -> Tensor:
    """w = 0 where A < 0 and mean(mu - p) over the datum's active tokens is above δ, else 1.

    DeepSeek-V3.2, arXiv 2512.02556, which names no δ; 0.1 is ours.
    """
    mean = layout.datum_means(mismatch.drift, mismatch.active)[layout.datum]
    dropped = (mismatch.advantages < 0) & (mean > settings.number("off_policy_delta"))
    return (~dropped).to(mean.dtype)


OFF_POLICY_MASK = Correction(
    name="off_policy_mask",
    weight=off_policy_mask,
    settings=(Setting("off_policy_delta", 0.1, "δ of `off_policy_mask`", low=0.0),),
)
