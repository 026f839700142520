"""Hands each unexpected end of a worker to everybody who watches."""

from __future__ import annotations

import asyncio
import weakref

from gateway.workers.launchers.base import WorkerExit


class Watch:
    """One watcher's own queue of ends. `None` in it says that no more will come."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[WorkerExit | None] = asyncio.Queue()

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> WorkerExit:
        end = await self.queue.get()
        if end is None:
            self.queue.put_nowait(None)  # whoever asks again gets the same answer
            raise StopAsyncIteration
        return end


class Watchers:
    """All watchers; one that is no longer referenced by its user is dropped."""

    def __init__(self) -> None:
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._closed = False

    def add(self) -> Watch:
        watch = Watch()
        self._watches.add(watch)
        if self._closed:
            watch.queue.put_nowait(None)
        return watch

    def tell(self, end: WorkerExit) -> None:
        for watch in self._watches:
            watch.queue.put_nowait(end)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for watch in self._watches:
                watch.queue.put_nowait(None)
