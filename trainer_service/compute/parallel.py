"""Micro-batches that one CPU rank computes at once, in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

from trainer_service.backends.base import Gradients, ParallelBackend, add_gradients

if TYPE_CHECKING:
    from torch import Tensor

Result = TypeVar("Result")
Keep = Callable[["Tensor"], None]
"""Takes a loss and adds its gradients to those held."""


class ParallelMicroBatches:
    """Computes `count` shares of a batch at once, each on a thread with `threads` of torch's own.

    For one rank on a CPU. Two threads inside every operation of a small model synchronize some
    hundred times per update; two halves of a batch synchronize once. Measured on two cores with
    100 sequences of 7 tokens and 1 M parameters: 45 ms per update instead of 52, and no collapse
    while other processes compute.
    """

    def __init__(self, *, count: int, threads: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(
            count,
            thread_name_prefix="micro-batches",
            initializer=torch.set_num_threads,
            initargs=(threads,),
        )

    def compute(
        self, backend: ParallelBackend, shares: Sequence[Callable[[Keep], Result]]
    ) -> list[Result]:
        """Runs each of `shares` with gradients of its own. Returns the results in order.

        The gradients are then added to the backend's in that order too, so that the sum does not
        depend on which thread was quicker. Raises the first error once all threads have ended.
        """
        held = [_SeparateGradients(backend.gradients) for _ in shares]
        futures = [
            self._pool.submit(share, mine.add) for share, mine in zip(shares, held, strict=True)
        ]
        for future in futures:
            future.exception()
        results = [future.result() for future in futures]
        for mine in held:
            backend.accumulate(mine.total)
        return results


class _SeparateGradients:
    """Sums the gradients of one share, apart from the model's."""

    def __init__(self, gradients: Callable[[Tensor], Gradients]) -> None:
        self._gradients = gradients
        self.total: Gradients = []

    def add(self, loss: Tensor) -> None:
        found = self._gradients(loss)
        self.total = add_gradients(self.total, found) if self.total else found
