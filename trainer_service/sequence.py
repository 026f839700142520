"""The order of a run's operations, and the memory of the last results."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Generic, TypeVar

Reply = TypeVar("Reply")


class OperationSequence(Generic[Reply]):
    """Lets operations through in log order, each once.

    `queued` is the newest operation handed to the engine, which applies them one after the
    other; `applied` the newest that has ended. At most `keep` results are remembered, so that
    a repeated operation is answered and not applied again.
    """

    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self._results: OrderedDict[int, Reply] = OrderedDict()
        self._running: dict[int, asyncio.Task[Reply]] = {}
        self._turn = asyncio.Condition()
        self.queued = 0
        self.applied = 0

    def result(self, seq_id: int) -> Reply | None:
        """The result of an operation that has ended, while it is remembered."""
        return self._results.get(seq_id)

    def running(self, seq_id: int) -> asyncio.Task[Reply] | None:
        """The task of an operation that waits or runs."""
        return self._running.get(seq_id)

    def begin(self, seq_id: int, task: asyncio.Task[Reply]) -> None:
        self._running[seq_id] = task
        task.add_done_callback(lambda _: self._running.pop(seq_id, None))

    async def wait_for_turn(self, *, previous: int, timeout: float) -> None:
        """Returns when the operation before has been handed to the engine.

        Raises `TimeoutError` when it does not come in time.
        """
        if self.queued >= previous:
            return
        async with asyncio.timeout(timeout), self._turn:
            await self._turn.wait_for(lambda: self.queued >= previous)

    async def enter(self, seq_id: int) -> None:
        """Call it in the same breath as handing the operation to the engine."""
        self.queued = max(self.queued, seq_id)
        async with self._turn:
            self._turn.notify_all()

    def ended(self, seq_id: int, reply: Reply) -> None:
        self.applied = max(self.applied, seq_id)
        self._results[seq_id] = reply
        while len(self._results) > self._keep:
            self._results.popitem(last=False)
