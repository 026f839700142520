"""A call of forward_backward. Its batch is read while the engine thread computes earlier ones."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from tandem.v1 import trainer_pb2

if TYPE_CHECKING:
    from trainer_service.batches.validation import Batch
    from trainer_service.service.operations import Operations


class BatchCall:
    """`read` is the batch, set when its reading begins. A joint pass sets `reply`. Without it, the
    batch is computed alone."""

    def __init__(self, request: trainer_pb2.ForwardBackwardRequest) -> None:
        self.request = request
        self.run_id = request.header.run_id
        self.reply: trainer_pb2.ForwardBackwardReply | None = None
        self.read: Future[Batch] | None = None

    def batch(self) -> Batch | None:
        """Return the batch, or None if it is not read yet or was refused."""
        if self.read is None or not self.read.done() or self.read.exception() is not None:
            return None
        return self.read.result()

    def compute(self, operations: Operations) -> trainer_pb2.ForwardBackwardReply:
        assert self.read is not None, "the batch is read before its turn"
        return self.reply or operations.forward_backward(self.request, self.read.result)
