"""Futures: the results that clients wait for by request_id.

A future leaves memory `FETCHED_GRACE` seconds after the fetch, because an answer may be lost on its
way. Afterwards only the journal has an operation's result, and the SDK repeats a sample. Above each
owner's bound, the oldest sample results move to files, and the oldest operation results are
dropped. Each owner also has a bounded number of unfetched samples."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import shutil
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import xxhash

from gateway.metrics import Metrics
from gateway.storage.data_directory import write_file
from tandem.errors import TandemError, describe
from tandem.telemetry import get_log

Media = Literal["json", "protobuf"]
Source = Literal["operation", "sample"]

LOOK_SECONDS = 1.0
"""Seconds between two looks at the reason of a request that waits."""
_MOST_WATCHED = 16
FETCHED_GRACE = 30.0
"""Seconds for which a fetched result can be fetched again."""
_SMALL = 2**10
"""Bytes. Smaller results never move to files, and only their number is bounded."""

RESULT_BYTES = 64 * 2**20
"""Result bytes per owner in memory. Older results move to the disk."""
RESULTS = 65_536
"""Unfetched sample results per owner. The oldest are dropped."""


@dataclass(frozen=True)
class Result:
    """The body of a successful answer, in memory or in a `file` of `file_bytes` bytes.
    `weight_version` is set for samples."""

    media: Media
    body: bytes = b""
    weight_version: str = ""
    file: Path | None = None
    file_bytes: int = 0

    @property
    def size(self) -> int:
        return len(self.body) if self.file is None else self.file_bytes


Outcome = Result | TandemError


@dataclass(frozen=True)
class Waiting:
    """Why a future has not ended. `paused` means that nothing moves until something else has
    started."""

    reason: str
    paused: bool = False

    @property
    def phase(self) -> str:
        """The first clause without its numbers, which change while nothing moves."""
        return re.sub(r"[\d.,]+", "", self.reason.partition(";")[0])


@dataclass(eq=False, repr=False, kw_only=True)
class Future:
    """The outcome of one request, now or later. `describe` returns the reason for waiting.
    `digest` tells two samples with one request_id apart. The table drops it at `dropped_at`, on the
    monotonic clock. `told` is the last phase of a pause that its client was told early.
    `unrecorded`: the client may have the outcome, and the journal does not have it yet."""

    request_id: str
    source: Source
    describe: Callable[[], Waiting]
    owner: str = ""
    digest: bytes = b""
    accepted_at: float = field(default_factory=time.monotonic)
    fetched_at: float | None = None
    dropped_at: float = math.inf
    outcome: Outcome | None = None
    told: str = ""
    unrecorded: bool = False
    done: asyncio.Future[None] = field(default_factory=asyncio.Future)

    @property
    def ended(self) -> bool:
        return self.done.done()

    def resolve(self, outcome: Outcome) -> None:
        if not self.done.done():
            self.outcome = outcome
            self.done.set_result(None)

    def resolve_early(self, outcome: Outcome) -> None:
        """Give the client an outcome before the operation's end, which the journal records."""
        self.unrecorded = not self.ended
        self.resolve(outcome)

    def on_end(self, tell: Callable[[Outcome], None]) -> None:
        def ended(_done: asyncio.Future[None]) -> None:
            assert self.outcome is not None
            tell(self.outcome)

        self.done.add_done_callback(ended)


@dataclass(eq=False, repr=False, kw_only=True)
class FutureTable:
    """This gateway's futures by request_id. `folder` holds results outside memory.
    `bytes_in_memory` and `max_samples` apply per owner. `result_ttl` is in seconds."""

    folder: Path
    result_ttl: float
    bytes_in_memory: int
    max_samples: int
    metrics: Metrics

    def __post_init__(self) -> None:
        self._futures: dict[str, Future] = {}
        self.closing = False
        self._long_polls: set[asyncio.Future[None]] = set()
        self._watched: Counter[str] = Counter()
        """By owner, the long polls in `wait_for_news`."""
        # Ended futures by owner, oldest first:
        self._large: defaultdict[str, OrderedDict[str, Future]] = defaultdict(OrderedDict)
        self._bytes: defaultdict[str, int] = defaultdict(int)
        self._samples: defaultdict[str, OrderedDict[str, Future]] = defaultdict(OrderedDict)
        self._file_work: set[asyncio.Task[None]] = set()
        self._log = get_log()
        watch = self.metrics.watch
        watch("futures", "Futures in memory, with and without a result.", lambda: len(self))
        watch(
            "result_bytes",
            "Bytes of the results in memory that nobody has fetched yet.",
            lambda: self.bytes_held,
        )

    def __len__(self) -> int:
        return len(self._futures)

    @property
    def bytes_held(self) -> int:
        return sum(self._bytes.values())

    async def clear_folder(self) -> None:
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

    def list_futures(self) -> list[Future]:
        return list(self._futures.values())

    def forget(self, request_id: str) -> None:
        """Drop a finished sample. Operations stay: the sweep reports them to the journal."""
        future = self._futures.get(request_id)
        if future is not None and future.ended and future.source == "sample":
            self._drop(future)

    def sweep(self) -> list[Future]:
        now = time.monotonic()
        over = [
            future
            for future in self._futures.values()
            if future.dropped_at < now and not future.unrecorded
        ]
        for future in over:
            self._drop(future)
        return over

    def note_fetched(self, future: Future) -> None:
        future.fetched_at = time.monotonic()
        future.dropped_at = future.fetched_at + FETCHED_GRACE

    # --- Waiting ------------------------------------------------------------------------------

    async def wait(self, future: Future, *, timeout: float) -> Outcome | None:
        """Return the outcome, or None after `timeout` seconds or at shutdown. Call `note_fetched`
        after the whole outcome was sent."""
        if not future.ended:
            await self.wait_until(future.done, timeout=timeout)
        return future.outcome

    async def wait_for_news(self, future: Future, *, timeout: float) -> Outcome | None:
        """Do as `wait`, but return None early if a pause begins or comes to another phase.

        Only a few requests of an owner are looked at, because the SDK tells its user once."""
        ends, owner = time.monotonic() + timeout, future.owner
        self._watched[owner] += 1
        try:
            while not future.ended and not self.closing and (left := ends - time.monotonic()) > 0:
                if self._watched[owner] > _MOST_WATCHED:
                    return await self.wait(future, timeout=left)
                await self.wait_until(future.done, timeout=min(left, LOOK_SECONDS))
                if future.ended or self.closing:
                    break
                waiting = future.describe()
                if waiting.paused and waiting.phase != future.told:
                    future.told = waiting.phase
                    break
            return future.outcome
        finally:
            self._watched[owner] -= 1
            if not self._watched[owner]:
                del self._watched[owner]

    async def wait_until(self, done: asyncio.Future[None], *, timeout: float) -> None:
        """Wait for `done`, for `timeout` seconds, or until shutdown."""
        if self.closing:
            return
        # Each long poll has its own future: removing one waiter from a shared one scans all
        # waiters.
        closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._long_polls.add(closing)
        try:
            either = [done, closing]
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._long_polls.discard(closing)

    def release_waiters(self) -> None:
        self.closing = True
        for closing in self._long_polls:
            if not closing.done():
                closing.set_result(None)

    # --- Results ------------------------------------------------------------------------------

    def _keep_result(self, future: Future) -> None:
        owner = future.owner
        if self._futures.get(future.request_id) is not future:
            return  # dropped since it ended
        if future.fetched_at is None:
            # Operations leave memory early, because the journal has their results.
            ttl = FETCHED_GRACE if future.source == "operation" else self.result_ttl
            future.dropped_at = time.monotonic() + ttl
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
        except OSError as error:  # it stays in memory rather than be lost
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
    """Return a hash that tells requests with one `seq_id` apart. It is not cryptographic."""
    digest = xxhash.xxh3_128(kind.encode())
    digest.update(request)
    return digest.digest()


async def _remove(file: Path) -> None:
    await asyncio.to_thread(file.unlink, missing_ok=True)
