"""One forward and backward pass for batches of several LoRA runs of one base model.

Each run has the micro-batches, the loss and the gradients of its own pass. Only the products with
the base model's matrices are common, so a run's results do not depend on its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from trainer_service.backends.base import Gradients
from trainer_service.backends.loop import (
    JointShare,
    ShareResult,
    compute_joint_shares,
    empty_share,
)
from trainer_service.batches.micro_batches import RankPlan

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_service.batches.validation import Batch
    from trainer_service.compute.trainer import BatchResult, RankTrainer


@dataclass(frozen=True)
class JointBatch:
    """A run's batch that can share a pass, with its plan: one micro-batch in each share at most."""

    trainer: RankTrainer
    batch: Batch
    plan: Sequence[RankPlan]

    @property
    def sizes(self) -> list[int]:
        """The tokens of each share."""
        return [
            sum(int(self.batch.lengths[list(part)].sum()) for part in share) for share in self.plan
        ]


def fits(together: Sequence[JointBatch]) -> bool:
    """True if the shares of all batches fit into the micro-batches of the memory plan."""
    limit = min(each.trainer.micro_batch_tokens for each in together)
    totals: dict[int, int] = {}
    for each in together:
        for share, tokens in enumerate(each.sizes):
            totals[share] = totals.get(share, 0) + tokens
    return all(tokens <= limit for tokens in totals.values())


def forward_backward_together(together: Sequence[JointBatch]) -> list[BatchResult] | None:
    """Compute the batches in one pass, and add each run's gradients to its held ones.

    None: the pass failed, and nothing has changed. A run's own pass then tells its error."""
    marks = [each.trainer.backend.mark() for each in together]
    first = together[0].trainer
    try:
        with first.backend.joint_pass():
            results = _compute(together)
    except Exception:
        undone = [
            mark is not None and each.trainer.backend.undo(mark)
            for each, mark in zip(together, marks, strict=True)
        ]
        if not all(undone):
            raise
        return None
    return [
        each.trainer.combined(each.batch, each.plan, result)
        for each, result in zip(together, results, strict=True)
    ]


def _compute(together: Sequence[JointBatch]) -> list[list[ShareResult]]:
    """The results of each batch's shares."""
    parallel = together[0].trainer.parallel
    passes = [_Pass(together, number) for number in range(max(len(each.plan) for each in together))]
    if parallel is None:
        for one in passes:
            one.backward()
    else:
        parallel.run_works([one.gradients for one in passes])
    found = []
    for member, each in enumerate(together):
        found.append([passes[number].result_of(member) for number in range(len(each.plan))])
        for one in passes[: len(each.plan)] if parallel else ():
            each.trainer.backend.accumulate(one.gradients_of(member))
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
            JointShare(each.trainer.backend, each.batch, next(filter(None, each.plan[number])))
            for each in (together[member] for member in self._members)
        ]
        self._empty = [empty_share(each.batch) for each in together]
        self._results: list[ShareResult] = []
        self._gradients: list[Gradients] = []

    def backward(self) -> None:
        self._results = compute_joint_shares(self._shares, keep=torch.Tensor.backward)

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
