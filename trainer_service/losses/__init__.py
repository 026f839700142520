"""The losses: one file each, pure functions of tensors, with formula and paper.

`LOSSES` maps each loss's name on the wire to its `Loss`. With default settings a loss is a sum over
tokens and datums, as the Tinker protocol defines it. Losses know nothing of padding, ranks or
micro-batches. `base.py` defines a loss. `policy.py`, `corrections.py` and `preference.py` hold
shared parts.

To add a loss, write a module here with a `Loss` (or a `DefinedLoss`) named `LOSS`, made by
`policy_loss` or `pair_loss` if it is of that kind. Add a row to `tests/support/losses/cases.py`.
Then run `scripts/loss_tables.py`, which writes the tables of `docs/training.md`."""

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
    LossSettings,
    Setting,
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

    `definition` is the gateway's payload for a `DefinedLoss`. Raises `UnknownLoss`, or a
    `UserError` for a wrong definition."""
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
    "LossSettings",
    "Setting",
    "Totals",
    "find_loss",
]
