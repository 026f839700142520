"""AdamW whose settings come with each step, with clipping by the global norm over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tandem.errors import GradientsNotFinite, OptimizerSetting
from tandem.v1 import trainer_pb2

if TYPE_CHECKING:
    from torch import Tensor


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


def _check(name: str, value: float, *, below: float, range_: str) -> None:
    if not 0 <= value < below:  # false for NaN, too
        raise OptimizerSetting(f"{name} must be {range_}, not {value}")


class AdamW:
    """torch's AdamW (Loshchilov & Hutter, arXiv 1711.05101) over named parameters, which may be
    sharded. `sum_over_ranks` adds up a scalar tensor in place over all ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        sum_over_ranks: Callable[[Tensor], None],
    ) -> None:
        self._parameters = dict(parameters)
        self._sum_over_ranks = sum_over_ranks
        self._adamw = torch.optim.AdamW(self._parameters.values(), lr=0.0, fused=True)

    def step(self, settings: AdamWSettings) -> dict[str, float]:
        """Applies the gradients once and forgets them. Returns metrics by plain names.

        Raises `GradientsNotFinite`, on all ranks alike, with the gradients dropped and the
        weights as they were.
        """
        gradients = self._local_gradients()
        norm = self._global_norm(gradients)
        if not math.isfinite(norm):
            self.drop_gradients()
            raise GradientsNotFinite(
                f"the norm of the gradients is {norm}; they were dropped and the weights are "
                "unchanged. Look for extreme advantages, weights or learning rates"
            )
        if settings.grad_clip_norm > 0 and norm > settings.grad_clip_norm:
            torch._foreach_mul_(gradients, settings.grad_clip_norm / (norm + 1e-6))
        for group in self._adamw.param_groups:
            group["lr"] = settings.learning_rate
            group["betas"] = (settings.beta1, settings.beta2)
            group["eps"] = settings.eps
            group["weight_decay"] = settings.weight_decay
        self._adamw.step()
        self.drop_gradients()
        return {"grad_norm": norm, "learning_rate": settings.learning_rate}

    def drop_gradients(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def state(self, *, create: bool) -> dict[str, Tensor]:
        """The live state tensors by `{parameter}.{exp_avg|exp_avg_sq|step}`.

        Empty before the first step, unless `create` makes it as zeros, for loading into.
        """
        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            state = self._adamw.state[parameter]
            if not state and create:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter.detach())
                state["exp_avg_sq"] = torch.zeros_like(parameter.detach())
            for key, tensor in state.items():
                found[f"{name}.{key}"] = tensor
        return found

    def reset(self) -> None:
        """Forgets gradients and moments, as if no step had been made."""
        self.drop_gradients()
        self._adamw.state.clear()

    def _local_gradients(self) -> list[Tensor]:
        gradients = (parameter.grad for parameter in self._parameters.values())
        return [
            gradient.to_local() if isinstance(gradient, DTensor) else gradient
            for gradient in gradients
            if gradient is not None
        ]

    def _global_norm(self, gradients: list[Tensor]) -> float:
        if not gradients:
            return 0.0
        total = torch.nn.utils.get_total_norm(gradients).double().square()
        self._sum_over_ranks(total)
        return math.sqrt(total.item()) if math.isfinite(total.item()) else float(total.item())
