"""The settings of one optimizer step, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.errors import OptimizerSetting
from tandem.v1 import trainer_pb2


@dataclass(frozen=True)
class AdamWSettings:
    """`grad_clip_norm` 0 turns clipping off."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float

    @classmethod
    def from_message(cls, message: trainer_pb2.AdamWParams) -> AdamWSettings:
        """Raises `OptimizerSetting`, naming the setting, its value and its range."""
        settings = cls(
            learning_rate=message.learning_rate,
            beta1=message.beta1,
            beta2=message.beta2,
            eps=message.eps,
            weight_decay=message.weight_decay,
            grad_clip_norm=message.grad_clip_norm,
        )
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            _check(name, getattr(settings, name), below=math.inf, range_="0 or more")
        for name in ("beta1", "beta2"):
            _check(name, getattr(settings, name), below=1.0, range_="at least 0 and below 1")
        return settings


@dataclass(frozen=True)
class DiMuonSettings:
    """`beta1` is the momentum of Muon, and AdamW's beta1 where that is used. A `grad_clip_norm`
    of 0 or less turns clipping off, as the SDK says of this optimizer."""

    learning_rate: float
    beta1: float
    grad_clip_norm: float

    @classmethod
    def from_message(cls, message: trainer_pb2.DiMuonParams) -> DiMuonSettings:
        """Raises `OptimizerSetting`, naming the setting, its value and its range."""
        settings = cls(
            learning_rate=message.learning_rate,
            beta1=message.beta1,
            grad_clip_norm=message.grad_clip_norm,
        )
        _check("learning_rate", settings.learning_rate, below=math.inf, range_="0 or more")
        _check("beta1", settings.beta1, below=1.0, range_="at least 0 and below 1")
        if not math.isfinite(settings.grad_clip_norm):
            raise OptimizerSetting(
                f"grad_clip_norm must be a finite number, not {settings.grad_clip_norm}"
            )
        return settings


StepSettings = AdamWSettings | DiMuonSettings

_PARAMS = {"adamw": "AdamParams", "dimuon": "DimuonParams"}


def step_settings(request: trainer_pb2.OptimStepRequest, *, optimizer: str) -> StepSettings:
    """What a step of a run that was created with `optimizer` is to do.

    Raises `OptimizerSetting` for settings of the other optimizer, or out of their range.
    """
    given = request.WhichOneof("optimizer") or "adamw"
    if given != optimizer:
        raise OptimizerSetting(
            f"this run was created with the optimizer {optimizer!r}, so its steps take "
            f"{_PARAMS[optimizer]}, not {_PARAMS[given]}"
        )
    if given == "dimuon":
        return DiMuonSettings.from_message(request.dimuon)
    return AdamWSettings.from_message(request.adamw)


def _check(name: str, value: float, *, below: float, range_: str) -> None:
    if not 0 <= value < below:  # false for NaN, too
        raise OptimizerSetting(f"{name} must be {range_}, not {value}")
