"""A table of workers in memory. Its commits take time, fail, and are lost with their gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from gateway.workers.table import WorkerEvent, WorkerRow
from tandem.errors import StorageFailed

_QueuedWrite = tuple[tuple[WorkerRow, ...], tuple[WorkerEvent, ...]]


class MemoryTable:
    """A `WorkerTable` in memory.

    A commit takes `commit_seconds`. The next `failing` commits fail. A cancelled caller's commit
    still takes effect, unless `forgets_cancelled`."""

    def __init__(self, *, commit_seconds: float = 0.0) -> None:
        self.rows: dict[str, WorkerRow] = {}
        self.events: list[WorkerEvent] = []
        self.drained_groups: set[str] = set()
        self.commit_seconds = commit_seconds
        self.failing = 0
        self.forgets_cancelled = False
        self._queue: list[_QueuedWrite] = []

    async def read(self) -> Sequence[WorkerRow]:
        return sorted(self.rows.values(), key=lambda row: row.since)

    async def write(self, rows: Sequence[WorkerRow], events: Sequence[WorkerEvent]) -> None:
        write: _QueuedWrite = (tuple(rows), tuple(events))
        self._queue.append(write)
        try:
            await asyncio.sleep(self.commit_seconds)
        except asyncio.CancelledError:
            if self.forgets_cancelled:
                self._queue.remove(write)
            self._apply_queue()
            raise
        if self.failing:
            self.failing -= 1
            self._queue.remove(write)
            raise StorageFailed("the disk is away")
        self._apply_queue()

    def write_soon(self, rows: Sequence[WorkerRow], events: Sequence[WorkerEvent]) -> None:
        self._queue.append((tuple(rows), tuple(events)))
        if len(self._queue) == 1:
            self._apply_queue()

    def _apply_queue(self) -> None:
        """Commit all queued writes in their order."""
        for rows, events in self._queue:
            self.events += events
            for row in rows:
                self.rows[row.key] = row
                if row.state == "gone":
                    del self.rows[row.key]
        self._queue.clear()

    async def busy_seconds(self) -> Mapping[str, float]:
        seconds: dict[str, float] = {}
        for event in self.events:
            owner = event.row.owner
            seconds[owner] = seconds.get(owner, 0.0) + event.busy_seconds
        return seconds

    async def drained(self) -> Sequence[str]:
        return sorted(self.drained_groups)

    async def set_drained(self, group: str, *, drained: bool) -> None:
        change = self.drained_groups.add if drained else self.drained_groups.discard
        change(group)
