"""Round robin between owners, for a scarce resource."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """A queue per owner; owners take turns.

    Example: a1, a2, a3 of one owner and then b1 of another come out as a1, b1, a2, a3."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Item]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def put(self, owner: str, item: Item) -> None:
        self._queues.setdefault(owner, deque()).append(item)

    def take(self) -> Item:
        owner, queue = next(iter(self._queues.items()))
        item = queue.popleft()
        if queue:
            self._queues.move_to_end(owner)
        else:
            del self._queues[owner]
        return item


class FairSemaphore:
    """Admits at most `slots` callers at once. Owners of waiting callers take turns."""

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
