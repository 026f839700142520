"""Trainer backends in which one rank raises a Python error."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from tests.support.other_packages import register
from trainer_service.backends.fsdp2 import Fsdp2Backend
from trainer_service.backends.loop import Done, ShareResult
from trainer_service.batches.micro_batches import RankPlan
from trainer_service.batches.validation import Batch
from trainer_service.checkpoints.storage import HashedFile
from trainer_service.optimizers import StepSettings


class FailsInForward(Fsdp2Backend):
    """The last rank raises an error without a sentence while the others wait."""

    def forward_backward(self, batch: Batch, share: RankPlan, *, done: Done) -> ShareResult:
        if self.is_last:
            _look_up({})
        return super().forward_backward(batch, share, done=done)

    @property
    def is_last(self) -> bool:
        return self._world.rank == self._world.size - 1


class FailsInStep(Fsdp2Backend):
    """The last rank raises an error in the optimizer while the others wait for its norm."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self._world.rank == self._world.size - 1:
            self.optimizer.step = _divide  # type: ignore[method-assign]


class FailsInSync(Fsdp2Backend):
    """The first sync of the last rank fails, as on a broken disk."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self._world.rank == self._world.size - 1:
            whole = HashedFile.sync

            def fail(_: HashedFile) -> None:
                HashedFile.sync = whole  # type: ignore[method-assign]
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            HashedFile.sync = fail  # type: ignore[method-assign]


def _divide(settings: StepSettings) -> dict[str, float]:
    raise ZeroDivisionError("no gradients in '/srv/models/tiny/config.json'")


def _look_up(weights: dict[str, float]) -> None:
    try:
        weights["of the datum"]
    except KeyError as error:
        raise AssertionError from error


def install(folder: Path) -> None:
    """Register the backends `fails_in_forward`, `fails_in_step` and `fails_in_sync`."""
    register(
        folder,
        "failing-ranks",
        fails_in_forward=f"{__name__}:FailsInForward",
        fails_in_step=f"{__name__}:FailsInStep",
        fails_in_sync=f"{__name__}:FailsInSync",
    )
