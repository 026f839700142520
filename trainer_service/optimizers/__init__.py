"""The optimizers: AdamW, and "dimuon" (Muon for hidden matrices, AdamW for the rest).

A run's `TrainingSpec` fixes the optimizer. The settings come with each step. Parameters may be
sharded. `staged.py` is AdamW for states in bfloat16 or on the host.

To add one, write a file with a class that satisfies `Optimizer`, put its settings into `base.py`,
and add a branch to `make_optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from torch import nn

from tandem.protocol.worker import TrainingSpec
from trainer_service.optimizers.adamw import AdamW
from trainer_service.optimizers.base import (
    AdamWSettings,
    DiMuonSettings,
    Optimizer,
    StepSettings,
    local,
    outer_parameters,
    step_settings,
)
from trainer_service.optimizers.dimuon import DiMuon

if TYPE_CHECKING:
    from torch import Tensor


def make_optimizer(
    training: TrainingSpec,
    parameters: Mapping[str, nn.Parameter],
    *,
    outer: Collection[str],
    device: str,
    sum_over_ranks: Callable[[Tensor], None],
) -> Optimizer:
    """Return the optimizer that `training` names.

    `outer` names the parameters of embeddings and head (`outer_parameters`). `device` is the
    backend's, "cpu" or "cuda". `sum_over_ranks` adds up a scalar tensor in place."""
    if training.optimizer == "adamw":
        return AdamW(
            parameters,
            sum_over_ranks=sum_over_ranks,
            device=device,
            moments_on_host=training.moments_on_host,
        )
    return DiMuon(parameters, outer=outer, sum_over_ranks=sum_over_ranks)


__all__ = [
    "AdamW",
    "AdamWSettings",
    "DiMuon",
    "DiMuonSettings",
    "Optimizer",
    "StepSettings",
    "local",
    "make_optimizer",
    "outer_parameters",
    "step_settings",
]
