"""A bounded buffer between the user's loop and the sender's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

_MOST_ROWS = 1000
_REQUEST_BYTES = 2**20
_ROW_BYTES, _VALUE_BYTES = 300, 100
"""Memory of a row, and of a value with its name, roughly."""


@dataclass(frozen=True)
class MetricRow:
    """Values of one step. `at` is in seconds since 1970.

    `source` is `user`, or `tandem`, whose steps are optimizer steps."""

    step: int
    at: float
    values: Mapping[str, float]
    source: str = "user"
    rows: int = 1

    @property
    def size(self) -> int:
        """Roughly the bytes in memory."""
        return _ROW_BYTES + _VALUE_BYTES * len(self.values)


@dataclass(frozen=True)
class RolloutRows:
    """Rollouts of one step that travel together. `batch` names them when they are sent again."""

    step: int
    batch: str
    rollouts: Sequence[Mapping[str, Any]]
    size: int

    @property
    def rows(self) -> int:
        return len(self.rollouts)


@dataclass(frozen=True)
class IdentityChange:
    """New name, tags or configuration. `answered` gets None or the gateway's refusal."""

    fields: Mapping[str, Any]
    answered: Future[None] = field(default_factory=Future)
    size: int = 0
    rows: int = 0


Item = MetricRow | RolloutRows | IdentityChange


class Outbox:
    """Rows in order of arrival. Above `limit` bytes, the oldest rows are dropped."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._waiters = 0
        self._closed = False
        self.abandoned = False

    def put(self, item: Item) -> int:
        """Add an item without waiting. Returns the number of dropped rows."""
        dropped = 0
        with self._changed:
            if self._closed:
                return item.rows
            self._items.append(item)
            self._bytes += item.size
            if len(self._items) == 1:  # only then does the sender wait for an item
                self._changed.notify_all()
            while self._bytes > self._limit:
                oldest = self._items.popleft()
                self._bytes -= oldest.size
                dropped += oldest.rows
        return dropped

    def drain(self, timeout: float, *, close: bool = False) -> int:
        """Wait until all is sent. Returns the number of rows that were not sent in `timeout` s.

        With `close`, the outbox takes no more rows, and abandons the unsent ones."""
        with self._changed:
            self._waiters += 1
            self._closed = self._closed or close
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: not self._items, timeout)
            finally:
                self._waiters -= 1
                self.abandoned = close and bool(self._items)
                self._changed.notify_all()
            return sum(item.rows for item in self._items)

    # --- For the sender ------------------------------------------------------------------

    @property
    def hurried(self) -> bool:
        return self._waiters > 0 or self._closed

    def has_work(self) -> bool:
        """Wait for an item. Returns False when no more will be sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed)
            return not self.abandoned and bool(self._items)

    def pause(self, seconds: float, *, hurried: float) -> None:
        """Wait, at most `hurried` seconds if `drain` waits too."""
        with self._changed:
            self._changed.wait_for(lambda: self.hurried, seconds)
            if self.hurried:
                self._changed.wait_for(lambda: self.abandoned, hurried)

    def oldest(self) -> list[Item]:
        """Return the items of the next request: several metric rows, or one other item."""
        found: list[Item] = []
        size = 0
        with self._changed:
            for item in self._items:
                size += item.size
                metrics = isinstance(item, MetricRow) and size <= _REQUEST_BYTES
                if found and (not metrics or len(found) == _MOST_ROWS):
                    break
                found.append(item)
                if not isinstance(item, MetricRow):
                    break
        return found

    def remove(self, items: Sequence[Item]) -> None:
        """Remove sent items, of which the oldest may have been dropped meanwhile."""
        with self._changed:
            for item in items:
                if self._items and self._items[0] is item:
                    self._items.popleft()
                    self._bytes -= item.size
            self._changed.notify_all()
