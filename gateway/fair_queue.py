"""Round robin between owners: one item of each, then the next of each."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Item = TypeVar("Item")

_CALLS_AT_ONCE = 16
"""Calls that are made before the event loop gets to anything else."""


class FairQueue(Generic[Item]):
    """First in, first out for each owner; owners take turns.

    Literal example: a1, a2, a3 of one owner and then b1 of another come out as a1, b1, a2, a3.
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Item]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, owner: str, item: Item) -> None:
        self._queues.setdefault(owner, deque()).append(item)
        self._size += 1

    def take(self) -> Item:
        """Remove and return the next item. The queue must not be empty."""
        owner, queue = next(iter(self._queues.items()))
        item = queue.popleft()
        self._size -= 1
        if queue:
            self._queues.move_to_end(owner)
        else:
            del self._queues[owner]
        return item

    def clear(self) -> None:
        self._queues.clear()
        self._size = 0


class FairStarter(FairQueue[Callable[[], None]]):
    """Makes the calls that it is given a few at a time, in turns between owners. The event loop
    serves other requests in between, whose calls may overtake those of a busy owner."""

    def __init__(self, *, calls_at_once: int = _CALLS_AT_ONCE) -> None:
        super().__init__()
        self._calls_at_once = calls_at_once
        self._scheduled = False

    def put(self, owner: str, item: Callable[[], None]) -> None:
        super().put(owner, item)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._call_some)

    def _call_some(self) -> None:
        self._scheduled = False
        for _ in range(min(self._calls_at_once, len(self))):
            self.take()()
        if self:
            self._schedule()


class FairSemaphore:
    """Lets at most `slots` in at once; the owners of those who wait take turns."""

    def __init__(self, *, slots: int) -> None:
        self._free = slots
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        if self._free > 0:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.put(owner, turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.take()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
