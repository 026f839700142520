"""The optimizer protocol, the settings of a step, and clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from tandem.errors import GradientsNotFinite, OptimizerSetting
from tandem.v1 import trainer_pb2

if TYPE_CHECKING:
    from torch import Tensor


class Optimizer(Protocol):
    """All ranks call each method in the same order."""

    def step(self, settings: StepSettings) -> dict[str, float]:
        """Apply the gradients and drop them. Return `grad_norm`, before clipping, and
        `learning_rate`.

        Raises `GradientsNotFinite` on all ranks alike, with the gradients dropped and the weights
        unchanged."""
        ...

    def drop_gradients(self) -> None: ...

    def state(self, *, create: bool) -> dict[str, Tensor]:
        """The live state tensors by `{parameter}.{kind of state}`, sharded like the parameters.

        Before the first step it is empty, unless `create` makes zeros to load into. After it, a
        parameter without a gradient has zeros, so saved and loaded states have equal names."""
        ...

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The unsharded shapes of all state tensors, also before they exist."""
        ...

    def reset(self) -> None:
        """Drop gradients and state, as before the first step."""
        ...


_LARGEST = 1e18
"""Bound of a setting that multiplies weights. Products of two such factors still fit float32.
Beyond float32, torch raises or makes weights infinite."""
_LEAST_EPS = torch.finfo(torch.float32).tiny
"""In float32, 0 would divide 0 by 0 for a parameter that never had a gradient."""


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
        """Raises `OptimizerSetting`."""
        settings = cls(
            learning_rate=message.learning_rate,
            beta1=message.beta1,
            beta2=message.beta2,
            eps=message.eps,
            weight_decay=message.weight_decay,
            grad_clip_norm=message.grad_clip_norm,
        )
        for name in ("learning_rate", "weight_decay"):
            _check_range(name, getattr(settings, name))
        for name in ("beta1", "beta2"):
            _check_below_one(name, getattr(settings, name))
        _check_range("eps", settings.eps, least=_LEAST_EPS)
        if not 0 <= settings.grad_clip_norm < math.inf:
            raise OptimizerSetting(
                f"grad_clip_norm must be 0 or more, not {settings.grad_clip_norm}"
            )
        return settings


@dataclass(frozen=True)
class DiMuonSettings:
    """`beta1` is Muon's momentum and AdamW's beta1. `grad_clip_norm` ≤ 0 turns clipping off, as the
    SDK documents."""

    learning_rate: float
    beta1: float
    grad_clip_norm: float

    @classmethod
    def from_message(cls, message: trainer_pb2.DiMuonParams) -> DiMuonSettings:
        """Raises `OptimizerSetting`."""
        settings = cls(
            learning_rate=message.learning_rate,
            beta1=message.beta1,
            grad_clip_norm=message.grad_clip_norm,
        )
        _check_range("learning_rate", settings.learning_rate)
        _check_below_one("beta1", settings.beta1)
        if not math.isfinite(settings.grad_clip_norm):
            raise OptimizerSetting(
                f"grad_clip_norm must be a finite number, not {settings.grad_clip_norm}"
            )
        return settings


StepSettings = AdamWSettings | DiMuonSettings
_PARAMS = {"adamw": "AdamParams", "dimuon": "DimuonParams"}


def step_settings(request: trainer_pb2.OptimStepRequest, *, optimizer: str) -> StepSettings:
    """Raises `OptimizerSetting` for settings of another optimizer, or out of range."""
    given = request.WhichOneof("optimizer") or "adamw"
    if given != optimizer:
        raise OptimizerSetting(
            f"this run was created with the optimizer {optimizer!r}, so its steps take "
            f"{_PARAMS[optimizer]}, not {_PARAMS[given]}"
        )
    if given == "dimuon":
        return DiMuonSettings.from_message(request.dimuon)
    return AdamWSettings.from_message(request.adamw)


def _check_range(name: str, value: float, *, least: float = 0.0) -> None:
    if not least <= value <= _LARGEST:  # false for NaN, too
        raise OptimizerSetting(f"{name} must be from {least:.3g} to {_LARGEST:g}, not {value}")


def _check_below_one(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise OptimizerSetting(f"{name} must be at least 0 and below 1, not {value}")


def clip(
    parameters: Collection[nn.Parameter],
    *,
    limit: float,
    sum_over_ranks: Callable[[Tensor], None],
) -> float:
    """Scale gradients down to the norm `limit`, or not at all if it is 0 or less. Return the norm
    before.

    Raises `GradientsNotFinite` on all ranks alike, with the gradients dropped."""
    found = [each.grad for each in parameters if each.grad is not None]
    gradients = [local(each) for each in found]
    norm = _global_norm([local(each) for each in found if _counts(each)], sum_over_ranks)
    if not math.isfinite(norm):
        for each in parameters:
            each.grad = None
        raise GradientsNotFinite(
            f"the norm of the gradients is {norm}; they were dropped and the weights are "
            "unchanged. Look for extreme advantages, weights or learning rates"
        )
    if 0 < limit < norm:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
    return norm


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a possibly sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _counts(gradient: Tensor) -> bool:
    """True if the norm includes this part: a gradient replicated along "tensor" counts once."""
    if not isinstance(gradient, DTensor):
        return True
    mesh = gradient.device_mesh
    if "tensor" not in (mesh.mesh_dim_names or ()):
        return True
    return not isinstance(gradient.placements[-1], Replicate) or mesh.get_local_rank("tensor") == 0


def _global_norm(gradients: list[Tensor], sum_over_ranks: Callable[[Tensor], None]) -> float:
    if not gradients:
        return 0.0
    norms = torch._foreach_norm(gradients, 2, torch.float32)
    total = torch.linalg.vector_norm(torch.stack(norms)).double().square()
    sum_over_ranks(total)
    return math.sqrt(total.item()) if math.isfinite(total.item()) else float(total.item())


def outer_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the parameters of embeddings and of the output head.

    Muon treats a matrix as a map between two spaces of features. A row of an embedding or of the
    head belongs to one token instead (Jordan et al., "Muon", 2024)."""
    head = model.get_output_embeddings()
    found: set[str] = set()
    for prefix, module in model.named_modules():
        if module is head or isinstance(module, nn.Embedding):
            named = module.named_parameters(prefix=prefix, remove_duplicate=False)
            found.update(name for name, _ in named)
    return frozenset(found)
