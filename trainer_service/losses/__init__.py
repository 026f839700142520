"""The losses: one file each, pure functions of tensors, with formula and paper.

`LOSSES` maps the name that a client gives to the loss. With default settings every loss is a sum
over tokens and datums, as the Tinker protocol defines it; none knows about padding, ranks or
micro-batches. `base.py` says what a loss is, `policy.py`, `corrections.py` and `preference.py`
hold what several losses share. A `DefinedLoss` is made anew for each request that names it.

To add a loss, write a module here with a `Loss` (or a `DefinedLoss`) as `LOSS`, and a row in
`tests/support/losses/cases.py`. Nothing else needs to change; `scripts/loss_tables.py` writes the
tables of `docs/losses.md`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from tandem.errors import UnknownLoss
from trainer_service.losses.base import (
    DatumLayout,
    DefinedLoss,
    Input,
    Loss,
    LossResult,
    Setting,
    Settings,
    Totals,
)
from trainer_service.losses.corrections import CORRECTIONS


def _registered() -> Mapping[str, Loss | DefinedLoss]:
    modules = [import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    losses: list[Loss | DefinedLoss] = [each.LOSS for each in modules if hasattr(each, "LOSS")]
    return MappingProxyType({loss.name: loss for loss in losses})


_REGISTERED = _registered()
LOSSES: Mapping[str, Loss] = MappingProxyType(
    {name: loss for name, loss in _REGISTERED.items() if isinstance(loss, Loss)}
)


def find_loss(name: str, *, definition: bytes = b"") -> Loss:
    """Return the loss that a request names.

    `definition` is what the gateway sent for a `DefinedLoss`. Every rank calls this with the same
    arguments. Raises `UnknownLoss`, or the `UserError` that says what is wrong with the definition.
    """
    loss = _REGISTERED.get(name)
    if loss is None:
        raise UnknownLoss(f"unknown loss {name[:100]!r}; known: {', '.join(sorted(LOSSES))}")
    return loss.define(definition) if isinstance(loss, DefinedLoss) else loss


__all__ = [
    "CORRECTIONS",
    "LOSSES",
    "DatumLayout",
    "DefinedLoss",
    "Input",
    "Loss",
    "LossResult",
    "Setting",
    "Settings",
    "Totals",
    "find_loss",
]
