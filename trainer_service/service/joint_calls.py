"""Waiting calls of several runs, computed in one pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tandem.errors import UserError
from tandem.telemetry import get_log
from trainer_service.batches.staleness import FreshBatch, without_stale
from trainer_service.compute.joint import JointBatch, fits, forward_backward_together
from trainer_service.service.batch_call import BatchCall
from trainer_service.service.operations import Operations


def compute_together(
    waiting: Sequence[tuple[str, BatchCall | None]], operations_of: Callable[[str], Operations]
) -> list[int]:
    """Compute the first call together with later ones that can join it, and set their replies.

    `waiting` has the run and the batch of each job, if it has one, in order. Returns the places of
    the first job and of the computed ones. A job of all runs has no run, and none passes it."""
    (first_run, first), *others = waiting
    places, met = [0], {first_run}
    joint = _JointCalls(operations_of)
    if first is None or not others or not joint.join(first):
        return places
    for place, (run_id, call) in enumerate(others, 1):
        if not run_id:
            break
        if call and run_id not in met and joint.join(call):
            places.append(place)
        met.add(run_id)
    if len(places) > 1:
        joint.compute()
    return places


class _JointCalls:
    """The calls of one pass."""

    def __init__(self, operations_of: Callable[[str], Operations]) -> None:
        self._operations_of = operations_of
        self._calls: list[BatchCall] = []
        self._fresh: list[FreshBatch] = []
        self._batches: list[JointBatch] = []

    def join(self, call: BatchCall) -> bool:
        """Add a call if it fits. Its run's earlier operations are done."""
        trainer, request = self._operations_of(call.run_id).trainer, call.request
        read = call.batch()
        if read is None or request.out_of_memory_at:
            return False
        if request.micro_batch_tokens not in (0, trainer.micro_batch_tokens):
            return False
        try:
            fresh = without_stale(read, step=trainer.step)
        except UserError:
            return False
        batch = trainer.joint_batch(fresh.batch)
        if batch is None or not fits([*self._batches, batch]):
            return False
        self._calls.append(call)
        self._fresh.append(fresh)
        self._batches.append(batch)
        return True

    def compute(self) -> None:
        """Compute all calls in one pass. If it fails, none has a reply, and each is computed alone.

        A reply's seconds are the run's part of the pass, by tokens."""
        began = time.perf_counter()
        members = [self._operations_of(call.run_id) for call in self._calls]
        tokens = [len(each.batch.tokens) for each in self._batches]
        for call, operations, size in zip(self._calls, members, tokens, strict=True):
            operations.progress.begin_batch(call.request.header.seq_id)
            operations.progress.expect(tokens=size, share=size)
        try:
            found = forward_backward_together(self._batches)
        finally:
            for operations in members:
                operations.progress.end_batch()
        if found is None:
            return
        spent = time.perf_counter() - began
        get_log().info("joint_pass", runs=len(members), tokens=sum(tokens), seconds=round(spent, 6))
        for call, fresh, joint, operations, results in zip(
            self._calls, self._fresh, self._batches, members, found, strict=True
        ):
            result = operations.trainer.combined(joint.batch, joint.plan, results)
            part = len(joint.batch.tokens) / sum(tokens)
            call.reply = operations.reply_of(call.request, fresh, result, seconds=spent * part)
