"""The losses: one file each, pure functions of tensors, with formula and paper.

`LOSSES` maps the name that a client gives to the loss. With default settings every loss is a sum
over tokens and datums, as the Tinker protocol defines it; none knows about padding, ranks or
micro-batches. `base.py` says what a loss is, `policy.py`, `corrections.py` and `preference.py`
hold what several losses share, and `custom/` computes losses that a request brings with it.

To add a loss, write a module here with a `Loss` as `LOSS`, and a row in
`tests/support/losses/cases.py`. Nothing else needs to change; `scripts/loss_tables.py` writes the
tables of `docs/losses.md`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from trainer_service.losses.base import (
    Input,
    Layout,
    Loss,
    LossResult,
    Setting,
    Settings,
    Totals,
)
from trainer_service.losses.corrections import CORRECTIONS
from trainer_service.losses.source import losses_for


def _all_losses() -> Mapping[str, Loss]:
    modules = [import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    losses: list[Loss] = [each.LOSS for each in modules if hasattr(each, "LOSS")]
    return MappingProxyType({loss.name: loss for loss in losses})


LOSSES = _all_losses()

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
