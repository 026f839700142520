"""A call of forward_backward: alone, or together with calls of other runs.

Functions import torch's users, because this module is loaded before torch's environment is set."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from tandem.errors import UserError
from tandem.telemetry import get_log
from tandem.v1 import trainer_pb2

if TYPE_CHECKING:
    from trainer_service.batches.staleness import FreshBatch
    from trainer_service.batches.validation import Batch
    from trainer_service.compute.joint import JointBatch
    from trainer_service.service.engine_thread import EngineThread
    from trainer_service.service.hosted_runs import HostedRuns
    from trainer_service.service.operations import Operations


class BatchCall:
    """A call with its batch read ahead, while the engine thread computes earlier ones."""

    def __init__(self, request: trainer_pb2.ForwardBackwardRequest, engine: EngineThread) -> None:
        self.request = request
        self.run_id = request.header.run_id
        self._engine = engine
        self._read: Future[Batch] | None = None
        self._fresh: FreshBatch | None = None
        self._reply: trainer_pb2.ForwardBackwardReply | None = None

    def read_ahead(self) -> None:
        request, run_id = self.request, self.run_id
        self._read = self._engine.read_ahead(
            lambda runs: runs.operations_of(run_id).read_batch(request)
        )

    def compute(self, operations: Operations) -> trainer_pb2.ForwardBackwardReply:
        """Return the reply of the joint pass, if there was one, or compute the batch alone."""
        assert self._read is not None, "an operation begins before its turn"
        return self._reply or operations.forward_backward(self.request, self._read.result)

    def joint_batch(self, operations: Operations) -> JointBatch | None:
        """Return the batch, if it is read and can share a pass. Only in the run's turn."""
        from trainer_service.batches.staleness import without_stale

        trainer, request = operations.trainer, self.request
        if self._read is None or not self._read.done() or self._read.exception() is not None:
            return None
        if request.out_of_memory_at or request.micro_batch_tokens not in (
            0,
            trainer.micro_batch_tokens,
        ):
            return None
        try:
            self._fresh = without_stale(self._read.result(), step=trainer.step)
        except UserError:
            return None
        return trainer.joint_batch(self._fresh.batch)


class JointCalls:
    """Calls of several runs for one pass. Nobody joins a `first` call that needs its own."""

    def __init__(self, runs: HostedRuns, first: BatchCall) -> None:
        self._runs = runs
        self._calls: list[BatchCall] = []
        self._batches: list[JointBatch] = []
        self._open = True
        self._open = self.join(first)

    def join(self, call: BatchCall) -> bool:
        """Add a call if it fits. Its run's earlier operations are done."""
        from trainer_service.compute.joint import fits

        if not self._open:
            return False
        batch = call.joint_batch(self._runs.operations_of(call.run_id))
        if batch is None or not fits([*self._batches, batch]):
            return False
        self._calls.append(call)
        self._batches.append(batch)
        return True

    def compute(self) -> None:
        """Compute all calls in one pass. If it fails, none has a reply, and each is computed alone.

        A reply's seconds are the run's part of the pass, by tokens."""
        from trainer_service.compute.joint import forward_backward_together

        began = time.perf_counter()
        members = [self._runs.operations_of(call.run_id) for call in self._calls]
        tokens = [len(each.batch.tokens) for each in self._batches]
        for call, operations, size in zip(self._calls, members, tokens, strict=True):
            operations.progress.begin_batch(call.request.header.seq_id)
            operations.progress.expect(tokens=size, share=size)
        try:
            results = forward_backward_together(self._batches)
        finally:
            for operations in members:
                operations.progress.end_batch()
        spent = time.perf_counter() - began
        get_log().info("joint_pass", runs=len(members), tokens=sum(tokens), seconds=round(spent, 6))
        for call, operations, size, result in zip(
            self._calls, members, tokens, results or (), strict=results is not None
        ):
            assert call._fresh is not None
            call._reply = operations.reply_of(
                call.request, call._fresh, result, seconds=spent * size / sum(tokens)
            )
