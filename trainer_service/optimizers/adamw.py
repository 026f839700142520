from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer_service.optimizers.base import AdamWSettings, StepSettings, clip
from trainer_service.optimizers.staged import StagedMoments

if TYPE_CHECKING:
    from torch import Tensor


class AdamW:
    """torch's AdamW (Loshchilov & Hutter, arXiv 1711.05101) over named parameters.

    Weight decay is decoupled. State: `exp_avg`, `exp_avg_sq` and `step`, in the parameters' dtype.
    `device` computes the step, wherever the parameters are."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        sum_over_ranks: Callable[[Tensor], None],
        device: str = "cpu",
        moments_on_host: bool = False,
    ) -> None:
        self._sum_over_ranks = sum_over_ranks
        self._moments: Moments | StagedMoments
        elsewhere = moments_on_host and device != "cpu"
        if elsewhere or any(each.dtype != torch.float32 for each in parameters.values()):
            self._moments = StagedMoments(parameters, device=device, on_host=moments_on_host)
        else:
            self._moments = Moments(parameters)

    def step(self, settings: StepSettings) -> dict[str, float]:
        assert isinstance(settings, AdamWSettings)
        norm = clip(
            self._moments.parameters.values(),
            limit=settings.grad_clip_norm,
            sum_over_ranks=self._sum_over_ranks,
        )
        self._moments.step(settings)
        self.drop_gradients()
        return {"grad_norm": norm, "learning_rate": settings.learning_rate}

    def drop_gradients(self) -> None:
        self._moments.drop_gradients()

    def state(self, *, create: bool) -> dict[str, Tensor]:
        return self._moments.state(create=create or self._moments.begun)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return moment_shapes(self._moments.parameters)

    def reset(self) -> None:
        self.drop_gradients()
        self._moments.reset()


def moment_shapes(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the unsharded shapes of AdamW's state tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in parameters.items():
        shapes[f"{name}.step"] = ()
        shapes[f"{name}.exp_avg"] = shapes[f"{name}.exp_avg_sq"] = tuple(parameter.shape)
    return shapes


class Moments:
    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self._adamw = (
            torch.optim.AdamW(self.parameters.values(), lr=0.0, fused=True)
            if self.parameters
            else None
        )

    def step(self, settings: AdamWSettings) -> None:
        if self._adamw is None:
            return
        for group in self._adamw.param_groups:
            group["lr"] = settings.learning_rate
            group["betas"] = (settings.beta1, settings.beta2)
            group["eps"] = settings.eps
            group["weight_decay"] = settings.weight_decay
        self._adamw.step()

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @property
    def begun(self) -> bool:
        return self._adamw is not None and any(self._adamw.state.values())

    def state(self, *, create: bool) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if self._adamw is None:
            return found
        for name, parameter in self.parameters.items():
            state = self._adamw.state[parameter]
            if not state and create:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter.detach())
                state["exp_avg_sq"] = torch.zeros_like(parameter.detach())
            for key, tensor in state.items():
                found[f"{name}.{key}"] = tensor
        return found

    def reset(self) -> None:
        if self._adamw is not None:
            self._adamw.state.clear()
