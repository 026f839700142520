"""One forward and backward pass for batches of several LoRA runs of one base model.

Each run has the micro-batches, the loss and the gradients of its own pass. Only the products with
the base model's matrices are common, so a run's results do not depend on its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from tandem.errors import describe
from tandem.telemetry import get_log
from trainer_service.backends.base import Gradients, TrainerBackend
from trainer_service.backends.loop import (
    JointShare,
    ShareResult,
    compute_joint_shares,
    empty_share,
)
from trainer_service.batches.micro_batches import RankPlan
from trainer_service.compute.parallel import ParallelMicroBatches

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_service.batches.validation import Batch


@dataclass(frozen=True)
class JointBatch:
    """A run's batch that can share a pass, with its plan: one micro-batch in each share at most.

    `micro_batch_tokens` is the run's limit. Runs of one trainer have the same `parallel`."""

    backend: TrainerBackend
    batch: Batch
    plan: Sequence[RankPlan]
    micro_batch_tokens: int
    parallel: ParallelMicroBatches | None

    @property
    def sizes(self) -> list[int]:
        """The tokens of each share."""
        return [
            sum(int(self.batch.lengths[list(part)].sum()) for part in share) for share in self.plan
        ]


def fits(together: Sequence[JointBatch]) -> bool:
    """True if the shares of all batches fit into the micro-batches of the memory plan."""
    limit = min(each.micro_batch_tokens for each in together)
    totals: dict[int, int] = {}
    for each in together:
        for share, tokens in enumerate(each.sizes):
            totals[share] = totals.get(share, 0) + tokens
    return all(tokens <= limit for tokens in totals.values())


def forward_backward_together(together: Sequence[JointBatch]) -> list[list[ShareResult]] | None:
    """Compute the batches in one pass, and add each run's gradients to its held ones.

    Returns the results of each batch's shares.

    None: the pass failed, and nothing has changed. A run's own pass then tells its error."""
    marks = [each.backend.mark() for each in together]
    try:
        with together[0].backend.joint_pass():
            return _compute(together)
    except Exception as error:
        undone = [
            mark is not None and each.backend.undo(mark)
            for each, mark in zip(together, marks, strict=True)
        ]
        if not all(undone):
            raise
        get_log().warning("joint_pass_failed", runs=len(together), reason=describe(error))
        return None


def _compute(together: Sequence[JointBatch]) -> list[list[ShareResult]]:
    """Gradients are added after all passes, so that a failed one has changed no held gradients."""
    parallel = together[0].parallel
    passes = [_Pass(together, number) for number in range(max(len(each.plan) for each in together))]
    if parallel is None:
        for one in passes:
            one.gradients()
    else:
        parallel.run_works([one.gradients for one in passes])
    found = []
    for member, each in enumerate(together):
        found.append([passes[number].result_of(member) for number in range(len(each.plan))])
        for one in passes[: len(each.plan)]:
            each.backend.accumulate(one.gradients_of(member))
    return found


class _Pass:
    """The pass of one thread: the shares with one number."""

    def __init__(self, together: Sequence[JointBatch], number: int) -> None:
        self._members = [
            member
            for member, each in enumerate(together)
            if number < len(each.plan) and any(each.plan[number])
        ]
        self._shares = [
            JointShare(each.backend, each.batch, next(filter(None, each.plan[number])))
            for each in (together[member] for member in self._members)
        ]
        self._empty = [empty_share(each.batch) for each in together]
        self._results: list[ShareResult] = []
        self._gradients: list[Gradients] = []

    def gradients(self) -> None:
        self._results = compute_joint_shares(self._shares, keep=self._keep)

    def _keep(self, loss: Tensor) -> None:
        trained = [list(share.backend.trained) for share in self._shares]
        flat = torch.autograd.grad(
            loss, [each for run in trained for each in run], allow_unused=True
        )
        ends = [0, *accumulate(len(run) for run in trained)]
        self._gradients = [list(flat[start:stop]) for start, stop in pairwise(ends)]

    def result_of(self, member: int) -> ShareResult:
        if member not in self._members:
            return self._empty[member]
        return self._results[self._members.index(member)]

    def gradients_of(self, member: int) -> Gradients:
        return self._gradients[self._members.index(member)] if member in self._members else []
