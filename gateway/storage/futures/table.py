"""Futures: what a client has a request_id for, and the results that nobody has fetched yet.

A future lives in memory from its acceptance until its result has been fetched, and a little
longer, since the answer may be lost on its way. After that the journal has the result of an
operation; a sample is gone, and the SDK asks for it again.

Memory for results is bounded. Each owner's share has its newest results. Older ones leave it: a
sample's result goes to a file, an operation's is dropped, since the journal has it. An owner
keeps a bounded number of unfetched samples; older ones are dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Literal

import xxhash

from gateway.metrics import Metrics
from tandem.errors import TandemError, describe
from tandem.telemetry import get_log
from tandem.weights.store import fsync_path, make_folder

Media = Literal["json", "protobuf"]
Source = Literal["operation", "sample"]

FETCHED_GRACE = 30.0
"""Seconds for which a fetched result can be fetched again."""
_SMALL = 2**10
"""Bytes of a result that is not worth a file; only the number of such results is bounded."""

RESULT_BYTES = 64 * 2**20
"""Results of an owner in memory. Older ones move to the disk."""
RESULTS = 65_536
"""Unfetched sample results of an owner. The oldest are dropped."""


@dataclass(frozen=True)
class Result:
    """The body of a successful answer; `weight_version` is that of a sample. A result that is
    not in memory is a `file` of `file_bytes`, and `body` is empty."""

    media: Media
    body: bytes = b""
    weight_version: str = ""
    file: Path | None = None
    file_bytes: int = 0

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.body) if self.file is None else self.file_bytes


Outcome = Result | TandemError


@dataclass(frozen=True)
class Waiting:
    """Why a future has not ended. `paused`: nothing moves until something else has started."""

    reason: str
    paused: bool = False


@dataclass(eq=False, repr=False, kw_only=True)
class Future:
    """The outcome of one request, now or later. `describe` says what it is waiting for, and
    `digest` tells the request of a sample from others with its request_id."""

    request_id: str
    source: Source
    describe: Callable[[], Waiting]
    owner: str = ""
    digest: bytes = b""
    accepted_at: float = field(default_factory=time.monotonic)
    fetched_at: float | None = None
    outcome: Outcome | None = None
    done: asyncio.Future[None] = field(default_factory=asyncio.Future)

    @property
    def ended(self) -> bool:
        return self.done.done()

    def resolve(self, outcome: Outcome) -> None:
        """The first outcome counts."""
        if not self.done.done():
            self.outcome = outcome
            self.done.set_result(None)

    def on_end(self, tell: Callable[[Outcome], None]) -> None:
        """Call `tell` with the outcome once it is there; soon, if it is there already."""

        def ended(_done: asyncio.Future[None]) -> None:
            assert self.outcome is not None
            tell(self.outcome)

        self.done.add_done_callback(ended)


class _Leaving:
    """Futures in the order in which they came in; each leaves the table `ttl` seconds later."""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._futures: OrderedDict[Future, float] = OrderedDict()

    def put(self, future: Future) -> None:
        self._futures.pop(future, None)
        self._futures[future] = time.monotonic()

    def discard(self, future: Future) -> None:
        self._futures.pop(future, None)

    def over(self) -> list[Future]:
        """Return those whose time is over, without looking at the others."""
        cutoff = time.monotonic() - self._ttl
        return [future for future, _ in takewhile(lambda f: f[1] < cutoff, self._futures.items())]


@dataclass(eq=False, repr=False, kw_only=True)
class FutureTable:
    """All futures of this gateway, by request_id. `folder` is for results that leave memory;
    `bytes_in_memory` and `max_samples` are for each owner; `result_ttl` in seconds."""

    folder: Path
    result_ttl: float
    bytes_in_memory: int
    max_samples: int
    metrics: Metrics

    def __post_init__(self) -> None:
        self._futures: dict[str, Future] = {}
        self._closing = False
        self._long_polls: set[asyncio.Future[None]] = set()
        self._fetched = _Leaving(FETCHED_GRACE)
        # The journal has the results of operations, so that memory need not.
        self._unfetched: dict[Source, _Leaving] = {
            "operation": _Leaving(FETCHED_GRACE),
            "sample": _Leaving(self.result_ttl),
        }
        # Of those that have ended, by owner, oldest first:
        self._large: defaultdict[str, OrderedDict[str, Future]] = defaultdict(OrderedDict)
        self._bytes: defaultdict[str, int] = defaultdict(int)
        self._samples: defaultdict[str, OrderedDict[str, Future]] = defaultdict(OrderedDict)
        self._file_work: set[asyncio.Task[None]] = set()
        self._log = get_log()

    def __len__(self) -> int:
        return len(self._futures)

    @property
    def bytes_held(self) -> int:
        """Bytes of results in memory, of all owners."""
        return sum(self._bytes.values())

    async def open(self) -> None:
        """Remove the results that an earlier gateway left; their samples are gone."""
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    async def close(self) -> None:
        await asyncio.gather(*self._file_work, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    def add(self, future: Future) -> Future:
        self._futures[future.request_id] = future
        future.on_end(lambda _outcome: self._keep_result(future))
        return future

    def get(self, request_id: str) -> Future | None:
        return self._futures.get(request_id)

    def all(self) -> list[Future]:
        return list(self._futures.values())

    def forget(self, request_id: str) -> None:
        """Drop the result of a sample. A sample that has not ended stays, and so does an
        operation, which the sweep reports to the journal."""
        future = self._futures.get(request_id)
        if future is not None and future.ended and future.source == "sample":
            self._drop(future)

    def sweep(self) -> list[Future]:
        """Drop what was fetched, or was not fetched within `result_ttl`; return it."""
        over = [
            future
            for leaving in (self._fetched, *self._unfetched.values())
            for future in leaving.over()
        ]
        for future in over:
            self._drop(future)
        return over

    def note_fetched(self, future: Future) -> None:
        """Note that the whole outcome was handed to its client."""
        future.fetched_at = time.monotonic()
        if self._futures.get(future.request_id) is future:
            self._unfetched[future.source].discard(future)
            self._fetched.put(future)

    # --- Waiting ------------------------------------------------------------------------------

    async def wait(self, future: Future, *, timeout: float) -> Outcome | None:
        """Return the outcome, or None if it is not there within `timeout` seconds or before the
        gateway shuts down. Whoever hands the whole outcome to its client calls `note_fetched`."""
        if not future.ended:
            await self.wait_until(future.done, timeout=timeout)
        return future.outcome

    async def wait_until(self, done: asyncio.Future[None], *, timeout: float) -> None:
        """Return when that is done, after `timeout` seconds, or when the gateway shuts down."""
        if self._closing:
            return
        # One for each long poll: leaving a future that thousands wait for takes looking at all.
        closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._long_polls.add(closing)
        try:
            either = [done, closing]
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._long_polls.discard(closing)

    @property
    def closing(self) -> bool:
        """Whether the gateway is shutting down."""
        return self._closing

    def release_waiters(self) -> None:
        """End all long polls, because the gateway is shutting down."""
        self._closing = True
        for closing in self._long_polls:
            if not closing.done():
                closing.set_result(None)

    # --- Results ------------------------------------------------------------------------------

    def _keep_result(self, future: Future) -> None:
        """Count the result of a future that has ended, and make room for it."""
        owner = future.owner
        if self._futures.get(future.request_id) is not future:
            return  # dropped since it ended
        if future.fetched_at is None:
            self._unfetched[future.source].put(future)
        if future.source == "sample":
            self._samples[owner][future.request_id] = future
            if len(self._samples[owner]) > self.max_samples:
                self._drop(next(iter(self._samples[owner].values())))
                self.metrics.results_given_up.inc()
        if isinstance(future.outcome, Result) and future.outcome.size > _SMALL:
            self._large[owner][future.request_id] = future
            self._bytes[owner] += future.outcome.size
            while self._bytes[owner] > self.bytes_in_memory and self._large[owner]:
                oldest = next(iter(self._large[owner].values()))
                self._uncount(oldest)
                if oldest.source == "operation":
                    self._drop(oldest)
                else:
                    self._in_background(self._move_to_file(oldest))

    def _drop(self, future: Future) -> None:
        if self._futures.get(future.request_id) is future:
            del self._futures[future.request_id]
        self._samples[future.owner].pop(future.request_id, None)
        self._unfetched[future.source].discard(future)
        self._fetched.discard(future)
        self._uncount(future)
        if isinstance(future.outcome, Result) and future.outcome.file is not None:
            self._in_background(_remove(future.outcome.file))
        for kept in (self._samples, self._large, self._bytes):
            if not kept.get(future.owner):
                kept.pop(future.owner, None)

    def _uncount(self, future: Future) -> None:
        found = self._large[future.owner].pop(future.request_id, None)
        if found is not None and isinstance(found.outcome, Result):
            self._bytes[future.owner] -= found.outcome.size

    async def _move_to_file(self, future: Future) -> None:
        assert isinstance(future.outcome, Result)
        body = future.outcome.body
        name = hashlib.sha256(future.request_id.encode()).hexdigest()
        file = self.folder / name[:2] / name
        try:
            await asyncio.to_thread(write_file, file, body)
        except OSError as error:  # it stays in memory, which is better than losing it
            self._log.error("result_not_written", reason=describe(error))
            return
        self.metrics.spilled_bytes.inc(len(body))
        future.outcome = replace(future.outcome, body=b"", file=file, file_bytes=len(body))
        if future.request_id not in self._samples.get(future.owner, ()):  # dropped meanwhile
            self._in_background(_remove(file))

    def _in_background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._file_work.add(task)
        task.add_done_callback(self._file_work.discard)


def digest_of(kind: str, request: bytes) -> bytes:
    """Return what tells a request from others with its `seq_id`; not a secure hash."""
    digest = xxhash.xxh3_128(kind.encode())
    digest.update(request)
    return digest.digest()


def write_file(file: Path, content: bytes, *, synced: bool = False) -> None:
    """Write a file, and its folder if there is none. A reader finds all of it, or what was there
    before; if it is `synced`, also after a power failure. Raises `OSError`."""
    if not file.parent.is_dir():
        with suppress(FileExistsError):
            make_folder(file.parent)
    partial = file.with_name(f".{file.name}")
    try:
        with partial.open("wb") as stream:
            stream.write(content)
            if synced:
                stream.flush()
                os.fsync(stream.fileno())
        partial.replace(file)
        if synced:
            fsync_path(file.parent)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


async def _remove(file: Path) -> None:
    await asyncio.to_thread(file.unlink, missing_ok=True)
