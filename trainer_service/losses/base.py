"""What a loss is: its inputs, its settings and a pure function of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LossResult:
    """`loss`: the scalar to differentiate. `sums`: scalars that add up over micro-batches and
    ranks, without gradient, in the order of the loss's `sum_names`."""

    loss: Tensor
    sums: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Loss:
    """A loss over E target tokens: `compute(logprobs [E], inputs {name: [E]}, settings)`.

    `required` inputs must come with every datum, in the shape of its `target_tokens`;
    `defaults` are inputs that may be absent, with the value that then holds for every token.
    `settings` are the numbers a client may give, with their defaults. `metrics` makes the
    reported numbers (keys `name:reduction`) out of the summed `sum_names` and the number of
    target tokens; its keys are the same for every batch, since the SDK combines chunks by them.
    """

    name: str
    compute: Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], LossResult]
    required: tuple[str, ...] = ()
    defaults: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, float] = field(default_factory=dict)
    sum_names: tuple[str, ...] = ()
    metrics: Callable[[Mapping[str, float]], dict[str, float]] = field(default=lambda sums: {})

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of all float inputs, required ones first."""
        return (*self.required, *self.defaults)
