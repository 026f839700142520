"""Lanes: several micro-batches at once in one process, each on a thread and a core of its own.

For one rank on a CPU. Two threads inside every operation of a small model wait for each other
some hundred times in an update, and for whatever else the machine runs; two halves of a batch
wait once. Measured on two cores for 100 sequences of 7 tokens and 1 M parameters: 45 ms an
update instead of 52, and no collapse while other processes compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from torch import Tensor

Result = TypeVar("Result")
Gradients = list["Tensor | None"]
"""One for each parameter; None where a loss does not depend on it."""


class Lanes:
    """`count` threads that compute, each with `threads` of torch's own."""

    def __init__(self, *, count: int, threads: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(
            count, thread_name_prefix="lane", initializer=torch.set_num_threads, initargs=(threads,)
        )

    def map(self, work: Sequence[Callable[[], Result]]) -> list[Result]:
        """Results in the order of `work`. The first error is raised when all have ended."""
        futures = [self._pool.submit(call) for call in work]
        for future in futures:
            future.exception()
        return [future.result() for future in futures]


class LaneGradients:
    """The gradients of one lane, kept apart from the model's until all lanes have ended."""

    def __init__(self, gradients: Callable[[Tensor], Gradients]) -> None:
        self._gradients = gradients
        self.total: Gradients = []

    def add(self, loss: Tensor) -> None:
        found = self._gradients(loss)
        self.total = added(self.total, found) if self.total else found


def added(held: Gradients, more: Gradients) -> Gradients:
    """Adds `more` to `held` in place, where both are there."""
    both = [(a, b) for a, b in zip(held, more, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(held, more, strict=True)]
