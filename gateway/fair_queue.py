"""Turns between owners: one of each, then the next of each, whoever came first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Thing = TypeVar("Thing")

_SLICE = 16
"""Things that are started in one go, before the event loop gets to anything else."""


class FairQueue(Generic[Thing]):
    """First come, first served for each owner; owners take turns.

    Literal example: a1, a2, a3 of one owner and then b1 of another come out as a1, b1, a2, a3.
    """

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, deque[Thing]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, owner: str, thing: Thing) -> None:
        self._lanes.setdefault(owner, deque()).append(thing)
        self._size += 1

    def take(self) -> Thing:
        """The next in turn. There must be one."""
        owner, lane = next(iter(self._lanes.items()))
        thing = lane.popleft()
        self._size -= 1
        if lane:
            self._lanes.move_to_end(owner)
        else:
            del self._lanes[owner]
        return thing

    def clear(self) -> None:
        self._lanes.clear()
        self._size = 0


class FairStarter:
    """Calls what it is given, in turns between owners and a few at a time: the event loop gets
    to what others ask for in between, and what came late may go before what came early."""

    def __init__(self, *, slice_size: int = _SLICE) -> None:
        self._slice = slice_size
        self._queue: FairQueue[Callable[[], None]] = FairQueue()
        self._scheduled = False

    def put(self, owner: str, start: Callable[[], None]) -> None:
        self._queue.put(owner, start)
        self._schedule()

    def clear(self) -> None:
        self._queue.clear()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._start_some)

    def _start_some(self) -> None:
        self._scheduled = False
        for _ in range(min(self._slice, len(self._queue))):
            self._queue.take()()
        if self._queue:
            self._schedule()


class FairSemaphore:
    """At most `slots` at once, and turns between the owners of those who wait."""

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
