"""What a trainer asks of an optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from trainer_service.optimizers.settings import StepSettings

if TYPE_CHECKING:
    from torch import Tensor


class Optimizer(Protocol):
    """Each method is called on all ranks in the same order."""

    def step(self, settings: StepSettings) -> dict[str, float]:
        """Applies the gradients once and forgets them. Returns metrics by plain names:
        `grad_norm`, the global norm before clipping, and `learning_rate`.

        Raises `GradientsNotFinite`, on all ranks alike, with the gradients dropped and the
        weights as they were.
        """
        ...

    def drop_gradients(self) -> None: ...

    def state(self, *, create: bool) -> dict[str, Tensor]:
        """The live state tensors by `{parameter}.{kind of state}`, sharded as the parameters.

        Empty before the first step, unless `create` makes it as zeros, for loading into. From
        then on of all parameters: zeros where none ever had a gradient, which is what the
        optimizer would begin with, so that what is saved and what is loaded have the same names.
        """
        ...

    def reset(self) -> None:
        """Forgets gradients and state, as if no step had been made."""
        ...
