"""The order of a run's operations, and the latest results."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from tandem.v1 import trainer_pb2

Reply = (
    trainer_pb2.ForwardBackwardReply
    | trainer_pb2.OptimStepReply
    | trainer_pb2.PublishReply
    | trainer_pb2.SaveCheckpointReply
    | trainer_pb2.LoadCheckpointReply
)

KEPT_RESULTS = 32
"""More than a gateway sends ahead (`DISPATCH_WINDOW`), so a repeated operation finds its result."""


class RunRemoved(Exception):
    """The operation's run was removed before its turn."""


class OperationSequence:
    """Admits the operations of a run in journal order, each once.

    `queued` is the newest operation handed to the engine thread, `applied` the newest finished one.
    The last `KEPT_RESULTS` results answer repeated operations."""

    def __init__(self) -> None:
        self._results: OrderedDict[int, Reply] = OrderedDict()
        self._running: dict[int, asyncio.Task[Reply]] = {}
        self._turn = asyncio.Condition()
        self._closed = False
        self.queued = 0
        self.applied = 0

    def result(self, seq_id: int) -> Reply | None:
        return self._results.get(seq_id)

    def running(self, seq_id: int) -> asyncio.Task[Reply] | None:
        return self._running.get(seq_id)

    def begin_operation(self, seq_id: int, task: asyncio.Task[Reply]) -> None:
        self._running[seq_id] = task
        task.add_done_callback(lambda _: self._running.pop(seq_id, None))

    async def wait_for_turn(self, *, previous: int, timeout: float) -> None:
        """Wait until the previous operation has been handed to the engine thread.

        Raises `TimeoutError`, or `RunRemoved`."""
        if self.queued < previous:
            async with asyncio.timeout(timeout), self._turn:
                await self._turn.wait_for(lambda: self._closed or self.queued >= previous)
        if self._closed:
            raise RunRemoved

    async def enter(self, seq_id: int) -> None:
        """Note that the operation was handed over. No await may come between the two."""
        self.queued = max(self.queued, seq_id)
        async with self._turn:
            self._turn.notify_all()

    async def close(self) -> None:
        self._closed = True
        async with self._turn:
            self._turn.notify_all()

    @property
    def idle(self) -> bool:
        return not self._running

    async def restored(self, seq_id: int) -> None:
        """Note that the state contains everything up to `seq_id`."""
        self.applied = max(self.applied, seq_id)
        await self.enter(seq_id)

    def ended(self, seq_id: int, reply: Reply) -> None:
        self.applied = max(self.applied, seq_id)
        self._results[seq_id] = reply
        while len(self._results) > KEPT_RESULTS:
            self._results.popitem(last=False)
