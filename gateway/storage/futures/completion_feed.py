"""Reports finished samples to clients that poll for all of theirs at once.

A target is one client of a sampling session: clients number their requests in blocks of 10⁹. It
uses memory from its first poll until `idle_ttl` seconds after its last. Cursors grow across
restarts, so a client with an earlier gateway's cursor is told that its samples are lost."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.identifiers import split_request_id
from gateway.storage.futures.table import Future, FutureTable, Outcome
from tandem.errors import TandemError

CLIENT_BLOCK = 1_000_000_000
_MOST_TARGETS = 16_384
"""Most targets with a queue, since clients choose their numbers. The least recently polled goes
first."""


@dataclass(frozen=True)
class Target:
    sampling_session_id: str
    client: int


@dataclass(frozen=True)
class EndedSample:
    """One finished sample. `size` is the result's bytes, None if the sample failed."""

    cursor: int
    request_id: str
    size: int | None


@dataclass(eq=False)
class _Queue:
    last: int
    waiting: list[EndedSample] = field(default_factory=list)
    changed: asyncio.Future[None] = field(default_factory=asyncio.Future)
    polls: int = 0
    polled_at: float = field(default_factory=time.monotonic)


class CompletionFeed:
    def __init__(self, *, futures: FutureTable, idle_ttl: float) -> None:
        self._futures = futures
        self._idle_ttl = idle_ttl
        self._started = _now()
        self._queues: OrderedDict[Target, _Queue] = OrderedDict()

    def watch(self, future: Future) -> None:
        target = target_of(future.request_id)
        if target is not None and target in self._queues:
            self._report_end(target, future)

    async def poll(
        self, target: Target, *, after: int, timeout: float, retrieved: Sequence[str]
    ) -> tuple[Sequence[EndedSample], int] | None:
        """Return the samples that ended after the cursor `after` (0: all), and the new cursor,
        within `timeout` seconds. Return None for an earlier gateway's cursor. Results of
        `retrieved` are dropped."""
        if 0 < after < self._started:
            return None
        queue = self._queues.get(target) or self._open(target)
        self._queues.move_to_end(target)
        for request_id in retrieved:
            if target_of(request_id) == target:
                self._futures.forget(request_id)
        queue.waiting = [done for done in queue.waiting if done.cursor > after]
        queue.polls += 1
        try:
            if not queue.waiting:
                await self._futures.wait_until(queue.changed, timeout=timeout)
        finally:
            queue.polls -= 1
            queue.polled_at = time.monotonic()
        return tuple(queue.waiting), queue.last

    def sweep(self) -> None:
        now = time.monotonic()
        over = [
            target
            for target, queue in self._queues.items()
            if not queue.polls and now - queue.polled_at > self._idle_ttl
        ]
        for target in over:
            del self._queues[target]

    def _open(self, target: Target) -> _Queue:
        if len(self._queues) >= _MOST_TARGETS:
            idle = next((t for t, q in self._queues.items() if not q.polls), None)
            if idle is not None:
                del self._queues[idle]
        queue = self._queues[target] = _Queue(last=_now())
        for future in self._futures.list_futures():
            if target_of(future.request_id) == target:
                self._report_end(target, future)
        return queue

    def _report_end(self, target: Target, future: Future) -> None:
        def ended(outcome: Outcome) -> None:
            queue = self._queues.get(target)
            if queue is None:
                return
            queue.last += 1
            size = None if isinstance(outcome, TandemError) else outcome.size
            queue.waiting.append(
                EndedSample(cursor=queue.last, request_id=future.request_id, size=size)
            )
            # A client may never move its cursor.
            del queue.waiting[: -self._futures.max_samples]
            queue.changed.set_result(None)
            queue.changed = asyncio.Future()

        future.on_end(ended)


def _now() -> int:
    """Return microseconds since 1970. No queue reports a million samples a second, so a later
    queue's cursors are higher."""
    return int(time.time() * 1e6)


def target_of(request_id: str) -> Target | None:
    """Return a sample's target, or None. Example: `s-ab12:sample:0:2000000007` belongs to
    the second client of `s-ab12:sample:0`."""
    parts = split_request_id(request_id)
    if parts is None or ":sample:" not in parts[0]:
        return None
    return Target(sampling_session_id=parts[0], client=parts[1] // CLIENT_BLOCK)
