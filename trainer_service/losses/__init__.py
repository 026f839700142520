"""The losses: one file each, pure functions of tensors, with formula and paper.

`LOSSES` maps the name a client gives to the loss. Left to their defaults all are sums over
tokens and datums, as the Tinker protocol defines them; none knows about padding, ranks or
micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from trainer_service.losses.base import Input, Loss, LossResult, Setting, Settings
from trainer_service.losses.cispo import CISPO
from trainer_service.losses.corrections import CORRECTIONS
from trainer_service.losses.cross_entropy import CROSS_ENTROPY
from trainer_service.losses.dpo import DPO
from trainer_service.losses.dppo import DPPO
from trainer_service.losses.dro import DRO
from trainer_service.losses.gspo import GSPO
from trainer_service.losses.importance_sampling import IMPORTANCE_SAMPLING
from trainer_service.losses.ipo import IPO
from trainer_service.losses.kto import KTO
from trainer_service.losses.layout import Layout, Totals
from trainer_service.losses.ppo import PPO
from trainer_service.losses.sapo import SAPO
from trainer_service.losses.source import losses_for
from trainer_service.losses.stable_reinforce import STABLE_REINFORCE

LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        loss.name: loss
        for loss in (
            CROSS_ENTROPY,
            IMPORTANCE_SAMPLING,
            PPO,
            CISPO,
            DRO,
            GSPO,
            STABLE_REINFORCE,
            SAPO,
            DPPO,
            DPO,
            IPO,
            KTO,
        )
    }
)

__all__ = [
    "CORRECTIONS",
    "LOSSES",
    "Input",
    "Layout",
    "Loss",
    "LossResult",
    "Setting",
    "Settings",
    "Totals",
    "losses_for",
]
