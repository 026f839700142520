"""Watchers of a launcher, which get its workers' unrequested ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from weakref import WeakSet

from tandem.protocol.worker import WorkerExit


class ExitWatchers:
    """Tells every watcher each exit after its `watch_exits`. Its length is their number.

    A watcher that never began to read leaves with its iterator."""

    def __init__(self) -> None:
        self._queues: WeakSet[asyncio.Queue[WorkerExit | None]] = WeakSet()
        self._closed = False

    def __len__(self) -> int:
        return len(self._queues)

    def watch_exits(self, before: Iterable[WorkerExit] = ()) -> AsyncIterator[WorkerExit]:
        """Yield the exits in `before` and all later ones, until `close`."""
        queue: asyncio.Queue[WorkerExit | None] = asyncio.Queue()
        for exit_ in (*before, *([None] if self._closed else [])):
            queue.put_nowait(exit_)
        self._queues.add(queue)
        return self._follow(queue)

    def tell(self, exit_: WorkerExit) -> None:
        for queue in self._queues:
            queue.put_nowait(exit_)

    def close(self) -> None:
        self._closed = True
        for queue in self._queues:
            queue.put_nowait(None)

    async def _follow(self, queue: asyncio.Queue[WorkerExit | None]) -> AsyncIterator[WorkerExit]:
        try:
            while (exit_ := await queue.get()) is not None:
                yield exit_
        finally:
            self._queues.discard(queue)
