"""Promises: what a client has been given a request_id for, and what came of it.

A future lives in memory from its acceptance until its result has been fetched (and a little
longer, since the answer may be lost on its way). Operations can be recalled from the operation
log after that; samples cannot, and the SDK asks for those again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tandem.errors import TandemError

Media = Literal["json", "protobuf"]
Source = Literal["operation", "sample"]

FETCHED_GRACE = 30.0
"""Seconds for which a fetched result can be fetched again."""


@dataclass(frozen=True)
class Result:
    """The body of a successful answer. `weight_version` is that of a sample."""

    media: Media
    body: bytes
    weight_version: str = ""


Outcome = Result | TandemError


@dataclass(frozen=True)
class Waiting:
    """Why a future has not ended. `paused`: nothing moves until something else has started."""

    reason: str
    paused: bool = False


class Future:
    """One promise. `describe` says what it is waiting for."""

    def __init__(
        self, *, request_id: str, source: Source, kind: str, describe: Callable[[], Waiting]
    ) -> None:
        self.request_id = request_id
        self.source: Source = source
        self.kind = kind
        self.describe = describe
        self.accepted_at = time.monotonic()
        self.ended_at: float | None = None
        self.fetched_at: float | None = None
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    @property
    def ended(self) -> bool:
        return self._outcome.done()

    def resolve(self, outcome: Outcome) -> None:
        """The first outcome counts."""
        if not self._outcome.done():
            self.ended_at = time.monotonic()
            self._outcome.set_result(outcome)

    def on_end(self, tell: Callable[[Outcome], None]) -> None:
        """Tells of the outcome once it is there; soon, if it is there already."""
        self._outcome.add_done_callback(lambda done: tell(done.result()))

    async def wait(
        self, *, timeout: float, closing: asyncio.Future[None] | None = None
    ) -> Outcome | None:
        """The outcome, or None when it has not come within `timeout` seconds, or before
        `closing` is done."""
        if not self._outcome.done():
            either: list[asyncio.Future[Outcome] | asyncio.Future[None]] = [self._outcome]
            if closing is not None:
                either.append(closing)
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return self._outcome.result() if self._outcome.done() else None


class Futures:
    """All promises of this gateway, by request_id."""

    def __init__(self, *, result_ttl: float) -> None:
        self._result_ttl = result_ttl
        self._futures: dict[str, Future] = {}
        self._closing: asyncio.Future[None] | None = None

    def add(self, future: Future) -> Future:
        self._futures[future.request_id] = future
        return future

    def get(self, request_id: str) -> Future | None:
        return self._futures.get(request_id)

    def __len__(self) -> int:
        return len(self._futures)

    def all(self) -> list[Future]:
        return list(self._futures.values())

    def forget(self, request_id: str) -> None:
        """The result of a sample is not needed any more. What has not ended stays, and so does
        an operation, which the sweep reports to the log."""
        future = self._futures.get(request_id)
        if future is not None and future.ended and future.source == "sample":
            del self._futures[request_id]

    async def wait(self, future: Future, *, timeout: float) -> Outcome | None:
        """As `Future.wait`, and cut short when the gateway shuts down. Whoever hands the whole
        outcome to its client notes that in `fetched_at`."""
        return await future.wait(timeout=timeout, closing=self._until_closing())

    async def wait_for_event(self, event: asyncio.Event, *, timeout: float) -> None:
        """Returns when the event is set, after `timeout` seconds, or when the gateway closes."""

        async def until_set() -> None:
            await event.wait()

        waiting = asyncio.create_task(until_set())
        either: list[asyncio.Future[None]] = [waiting, self._until_closing()]
        try:
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    def _until_closing(self) -> asyncio.Future[None]:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_future()
        return self._closing

    def release_waiters(self) -> None:
        """Ends all long polls: the gateway is shutting down."""
        if self._closing is not None and not self._closing.done():
            self._closing.set_result(None)

    def sweep(self) -> list[Future]:
        """Forgets what was fetched, or has not been for `result_ttl`; returns what it forgot."""
        now = time.monotonic()
        gone = [f for f in self._futures.values() if self._is_over(f, now)]
        for future in gone:
            del self._futures[future.request_id]
        return gone

    def _is_over(self, future: Future, now: float) -> bool:
        if future.ended_at is None:
            return False
        if future.fetched_at is not None:
            return now - future.fetched_at > FETCHED_GRACE
        # The log has the results of operations, so that memory need not.
        limit = FETCHED_GRACE if future.source == "operation" else self._result_ttl
        return now - future.ended_at > limit
