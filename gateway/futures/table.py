"""Promises: what a client has been given a request_id for, and what came of it.

A future lives in memory from its acceptance until its result has been fetched (and a little
longer, since the answer may be lost on its way). Operations can be recalled from the operation
log after that; samples cannot, and the SDK asks for those again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from tandem.errors import TandemError

Media = Literal["json", "protobuf"]
Source = Literal["operation", "sample"]

FETCHED_GRACE = 30.0
"""Seconds for which a fetched result can be fetched again."""


@dataclass(frozen=True)
class Result:
    """The body of a successful answer. `weight_version` is that of a sample.

    A large one that is not in memory lies in a `file` of `file_bytes`, and `body` is empty.
    """

    media: Media
    body: bytes = b""
    weight_version: str = ""
    file: Path | None = None
    file_bytes: int = 0

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.body) if self.file is None else self.file_bytes


Outcome = Result | TandemError


@dataclass(frozen=True)
class Waiting:
    """Why a future has not ended. `paused`: nothing moves until something else has started."""

    reason: str
    paused: bool = False


class Future:
    """One promise. `describe` says what it is waiting for, `owner` whose it is."""

    def __init__(
        self,
        *,
        request_id: str,
        source: Source,
        kind: str,
        describe: Callable[[], Waiting],
        owner: str = "",
    ) -> None:
        self.request_id = request_id
        self.owner = owner
        self.source: Source = source
        self.kind = kind
        self.describe = describe
        self.accepted_at = time.monotonic()
        self.ended_at: float | None = None
        self.fetched_at: float | None = None
        self._outcome: Outcome | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def ended(self) -> bool:
        return self._ended.done()

    @property
    def outcome(self) -> Outcome | None:
        return self._outcome

    def resolve(self, outcome: Outcome) -> None:
        """The first outcome counts."""
        if not self._ended.done():
            self.ended_at = time.monotonic()
            self._outcome = outcome
            self._ended.set_result(None)

    def move_to(self, file: Path) -> None:
        """The body of its result lies in a file from now on."""
        assert isinstance(self._outcome, Result)
        size = self._outcome.size
        self._outcome = replace(self._outcome, body=b"", file=file, file_bytes=size)

    def on_end(self, tell: Callable[[Outcome], None]) -> None:
        """Tells of the outcome once it is there; soon, if it is there already."""

        def ended(_done: asyncio.Future[None]) -> None:
            assert self._outcome is not None
            tell(self._outcome)

        self._ended.add_done_callback(ended)

    async def wait(
        self, *, timeout: float, closing: asyncio.Future[None] | None = None
    ) -> Outcome | None:
        """The outcome, or None when it has not come within `timeout` seconds, or before
        `closing` is done."""
        if not self._ended.done():
            either = [self._ended] if closing is None else [self._ended, closing]
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return self._outcome


class ResultKeeper(Protocol):
    """Sees to it that results that nobody fetches do not fill the memory."""

    def keep(self, future: Future, /) -> list[Future]:
        """One that has ended; returns those that are to be dropped for it."""

    def forget(self, future: Future, /) -> None:
        """One that is not needed any more."""


class FutureTable:
    """All promises of this gateway, by request_id."""

    def __init__(self, *, result_ttl: float, keeper: ResultKeeper) -> None:
        self._result_ttl = result_ttl
        self._keeper = keeper
        self._futures: dict[str, Future] = {}
        self._closing: asyncio.Future[None] | None = None

    def add(self, future: Future) -> Future:
        self._futures[future.request_id] = future
        future.on_end(lambda _outcome: self._keep(future))
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
            self._drop(future)

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

    @property
    def closing(self) -> bool:
        """Whether the gateway is shutting down."""
        return self._closing is not None and self._closing.done()

    def release_waiters(self) -> None:
        """Ends all long polls: the gateway is shutting down."""
        if not self._until_closing().done():
            self._until_closing().set_result(None)

    def sweep(self) -> list[Future]:
        """Forgets what was fetched, or has not been for `result_ttl`; returns what it forgot."""
        now = time.monotonic()
        gone = [f for f in self._futures.values() if self._is_over(f, now)]
        for future in gone:
            self._drop(future)
        return gone

    def _keep(self, future: Future) -> None:
        for over in self._keeper.keep(future):
            self._drop(over)

    def _drop(self, future: Future) -> None:
        if self._futures.get(future.request_id) is future:
            del self._futures[future.request_id]
        self._keeper.forget(future)

    def _is_over(self, future: Future, now: float) -> bool:
        if future.ended_at is None:
            return False
        if future.fetched_at is not None:
            return now - future.fetched_at > FETCHED_GRACE
        # The log has the results of operations, so that memory need not.
        limit = FETCHED_GRACE if future.source == "operation" else self._result_ttl
        return now - future.ended_at > limit
