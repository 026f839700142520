"""Corrections for the mismatch between sampler and trainer: weights that multiply a policy loss.

One file each. A request names them in the setting `correction`, several joined by "+"
("tis+off_policy_mask"); their weights are multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from trainer_service.losses.corrections.base import Correction, Mismatch
from trainer_service.losses.corrections.geometric import GEOMETRIC
from trainer_service.losses.corrections.icepop import ICEPOP
from trainer_service.losses.corrections.mis import MIS
from trainer_service.losses.corrections.off_policy_mask import OFF_POLICY_MASK
from trainer_service.losses.corrections.seq_mis import SEQ_MIS
from trainer_service.losses.corrections.seq_tis import SEQ_TIS
from trainer_service.losses.corrections.tis import TIS

CORRECTIONS: Mapping[str, Correction] = MappingProxyType(
    {each.name: each for each in (TIS, SEQ_TIS, MIS, SEQ_MIS, ICEPOP, GEOMETRIC, OFF_POLICY_MASK)}
)

__all__ = ["CORRECTIONS", "Correction", "Mismatch"]
