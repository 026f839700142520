"""DPO: direct preference optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch.nn import functional

from trainer_service.losses.base import DatumLayout, LossResult, LossSettings
from trainer_service.losses.preference import pair_loss, pair_result, pairs

if TYPE_CHECKING:
    from torch import Tensor


def dpo(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: LossSettings, layout: DatumLayout
) -> LossResult:
    """-Σ log σ(β·(c - r)) over pairs, with c and r = Σ w·(p - ref) of the chosen and the rejected.

    Datum 2i of a request is chosen over datum 2i + 1. Rafailov et al., arXiv 2305.18290."""
    chosen, rejected = pairs(logprobs, inputs, layout)
    values = -functional.logsigmoid(settings.number("beta") * (chosen - rejected))
    return pair_result(values, chosen=chosen, rejected=rejected, settings=settings, layout=layout)


LOSS = pair_loss("dpo", dpo)
