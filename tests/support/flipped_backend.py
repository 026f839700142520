"""A trainer backend that is `fsdp2`, with the sign of each gradient flipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.support.flipped import flip
from tests.support.other_packages import register
from trainer_service.backends.fsdp2 import Fsdp2Backend


class FlippedBackend(Fsdp2Backend):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        register_optimizer_step_pre_hook(flip)


def install(folder: Path) -> None:
    """Register the backend `flipped`."""
    register(folder, "flipped-gradients", flipped=f"{__name__}:FlippedBackend")
