"""Micro-batches that one CPU rank computes at once, in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from trainer_service.backends.base import Gradients, TrainerBackend, add_gradients
from trainer_service.backends.loop import Done, ShareResult, compute_share
from trainer_service.batches.micro_batches import RankPlan
from trainer_service.batches.validation import Batch

if TYPE_CHECKING:
    from torch import Tensor


class ParallelMicroBatches:
    """Computes up to `count` shares of a batch at once, each on a thread with `threads` of
    torch's own.

    For one rank on a CPU. Two threads inside every operation of a small model synchronize some
    hundred times per update; two halves of a batch synchronize once. Measured on two cores with
    100 sequences of 7 tokens and 1 M parameters: 45 ms per update instead of 52, and no collapse
    while other processes compute. A share has `least_tokens`, or there are fewer of them:
    compiled, two halves of those sequences took 49 ms of processor time and 31 ms, one share 35 ms
    of each, and left a core to whoever sends the next batch.
    """

    def __init__(self, *, count: int, threads: int, least_tokens: int = 1) -> None:
        self._count, self._least_tokens = count, least_tokens
        self._pool = ThreadPoolExecutor(
            count,
            thread_name_prefix="micro-batches",
            initializer=torch.set_num_threads,
            initargs=(threads,),
        )

    def shares(self, tokens: int) -> int:
        """How many shares a batch of so many tokens is divided into."""
        return max(1, min(self._count, tokens // self._least_tokens))

    def warm_up(self, backend: TrainerBackend) -> None:
        """On one of the threads: what is compiled depends on how many of torch's own one has."""
        self._pool.submit(backend.warm_up).result()

    def compute(
        self, backend: TrainerBackend, batch: Batch, plan: Sequence[RankPlan], *, done: Done
    ) -> list[ShareResult]:
        """Computes each share of a plan with gradients of its own. Returns the results in order.

        The gradients are then added to the backend's in that order too, so that the sum does not
        depend on which thread was quicker. Raises the first error once all threads have ended.
        """
        held = [_SeparateGradients(backend.gradients) for _ in plan]
        futures = [
            # No collectives have to match here, so that nothing is computed for empty ones.
            self._pool.submit(
                compute_share, backend, batch, tuple(filter(None, share)), keep=mine.add, done=done
            )
            for share, mine in zip(plan, held, strict=True)
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
