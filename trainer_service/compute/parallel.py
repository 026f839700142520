"""Micro-batches that one CPU rank computes at once, in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

from trainer_service.backends.base import Gradients, TrainerBackend, add_gradients
from trainer_service.backends.loop import Done, ShareResult, compute_share
from trainer_service.batches.micro_batches import RankPlan
from trainer_service.batches.validation import Batch

if TYPE_CHECKING:
    from torch import Tensor

Result = TypeVar("Result")


class ParallelMicroBatches:
    """Computes up to `count` shares of a batch at once, each on a thread with `threads` torch
    threads.

    Threads inside a small model's operations synchronize hundreds of times per update, shares only
    once. Shares have at least `least_tokens`, because small compiled shares cost more than one."""

    def __init__(self, *, count: int, threads: int, least_tokens: int = 1) -> None:
        self._count, self._least_tokens = count, least_tokens
        self._pool = ThreadPoolExecutor(
            count,
            thread_name_prefix="micro-batches",
            initializer=torch.set_num_threads,
            initargs=(threads,),
        )

    def shares(self, tokens: int) -> int:
        return max(1, min(self._count, tokens // self._least_tokens))

    def run_works(self, works: Sequence[Callable[[], None]]) -> None:
        """Raises the first error after all threads have ended."""
        futures = [self._pool.submit(work) for work in works]
        for future in futures:
            future.exception()
        for future in futures:
            future.result()

    def run_work(self, work: Callable[[], Result]) -> Result:
        """Run one share's work, with its number of torch threads."""
        return self._pool.submit(work).result()

    def compute(
        self, backend: TrainerBackend, batch: Batch, plan: Sequence[RankPlan], *, done: Done
    ) -> list[ShareResult]:
        """Compute each share of a plan with its own gradients, added in order, so threads change no
        bits.

        Raises the first error after all threads have ended."""
        held = [_SeparateGradients(backend.gradients) for _ in plan]
        futures = [
            # No collectives have to match here, so empty micro-batches are skipped.
            self._pool.submit(
                compute_share,
                backend,
                batch,
                tuple(filter(None, share)),
                keep=mine.add_loss,
                done=done,
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
    def __init__(self, gradients: Callable[[Tensor], Gradients]) -> None:
        self._gradients = gradients
        self.total: Gradients = []

    def add_loss(self, loss: Tensor) -> None:
        found = self._gradients(loss)
        self.total = add_gradients(self.total, found) if self.total else found
