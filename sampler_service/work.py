"""Work for the engine's thread: samples, loads, sleeps and wakes, each with its future.

Cancelling a future drops the work, except a begun sleep or wake."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, islice
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from sampler_service.engine import EngineDelta, EngineRequest, EngineResult, SleepLevel
from sampler_service.lifecycle import SwitchReport
from sampler_service.weights.loader import LoadableVersion, LoadOutcome
from tandem.errors import TandemError
from tandem.weights import version_number

_Result = TypeVar("_Result")

_LOGGED_REQUESTS = 8
_BURST_QUIET_SECONDS = 0.001
_BURST_LONGEST_SECONDS = 0.050


class Updates(Enum):
    """What newer weights of its run do to running work. By default, in-flight work continues with
    versions that in-flight work names."""

    DEFAULT = 0
    KEEP = 1
    ABORT = 2


@dataclass(frozen=True)
class SampleJob:
    """A request for a version. With `in_flight`, a newer version of the run serves too. `updates`
    other than the default need `in_flight`.

    For a streamed request, the engine's thread calls `on_deltas` after each step. It must return at
    once. The last call comes before the future is resolved."""

    request: EngineRequest
    version: LoadableVersion
    session_id: str
    seq_id: int
    in_flight: bool = False
    updates: Updates = Updates.DEFAULT
    on_deltas: Callable[[Sequence[EngineDelta], LoadableVersion], None] | None = None


@dataclass(frozen=True)
class Sampled:
    """The result of a request, and the versions that computed it, in order.

    `seconds` counts from the admission into the engine."""

    result: EngineResult
    versions: tuple[LoadableVersion, ...]
    seconds: float

    @property
    def version(self) -> LoadableVersion:
        return self.versions[-1]


@dataclass(eq=False, kw_only=True)
class Queued(Generic[_Result]):
    """One piece of work. `arrived` is in seconds of the scheduler's clock."""

    arrived: float
    future: Future[_Result] = field(default_factory=Future)

    def begin(self) -> bool:
        """Return False if the work was cancelled. Later it cannot be."""
        return self.future.running() or self.future.set_running_or_notify_cancel()

    def succeed(self, result: _Result) -> None:
        if self.begin():
            self.future.set_result(result)

    def fail(self, error: TandemError) -> None:
        if self.begin():
            self.future.set_exception(error)


@dataclass(eq=False, kw_only=True)
class QueuedWork(Queued[_Result]):
    """Work that needs a version. `weights` are its own, or the base model's for an adapter."""

    version: LoadableVersion
    weights: LoadableVersion
    in_flight: bool = False
    updates: Updates = Updates.DEFAULT

    def update(self, version: LoadableVersion) -> None:
        self.version, self.weights = version, self.weights if version.adapter else version

    def may_follow(self, version: LoadableVersion, *, led: bool) -> bool:
        """Return whether a newer version of its run may change or end the work. `led`: other
        in-flight work names it."""
        mine = self.version
        return (
            self.in_flight
            and (led or self.updates is not Updates.DEFAULT)
            and bool(mine.run_id)
            and (mine.run_id, mine.adapter) == (version.run_id, version.adapter)
            and version_number(mine.name) < version_number(version.name)
        )


@dataclass(eq=False, kw_only=True)
class QueuedSample(QueuedWork[Sampled]):
    """A request, the times of its admission and first step (`begun`), and its earlier versions."""

    job: SampleJob
    admitted: float = 0.0
    begun: float = math.inf
    before: tuple[LoadableVersion, ...] = ()

    def carry_over(self, version: LoadableVersion) -> None:
        self.before = (*self.before, self.version)
        self.update(version)

    @property
    def order(self) -> tuple[str, int, float]:
        return (self.job.session_id, self.job.seq_id, self.arrived)


class QueuedLoad(QueuedWork[LoadOutcome]):
    """A requested load of a version."""


@dataclass(eq=False, kw_only=True)
class QueuedSleep(Queued[SwitchReport]):
    level: SleepLevel


@dataclass(eq=False, kw_only=True)
class QueuedWake(Queued[SwitchReport]):
    """A requested wake. Without `weights`, the oldest waiting work decides."""

    weights: LoadableVersion | None


Work = QueuedSample | QueuedLoad


def request_ids(works: Iterable[Work]) -> list[str]:
    """Return up to `_LOGGED_REQUESTS` request ids in the gateway's form."""
    samples = (work.job.request.id for work in works if isinstance(work, QueuedSample))
    return [id_.partition("#")[0] for id_ in islice(samples, _LOGGED_REQUESTS)]


QueuedSwitch = QueuedSleep | QueuedWake


class WaitingList:
    """Waiting work, grouped by version, so that a step looks only at the first of each."""

    def __init__(self) -> None:
        self._of_version: dict[LoadableVersion, dict[Work, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Any thread may call this."""
        return self._count

    def __iter__(self) -> Iterator[Work]:
        return chain.from_iterable(self._of_version.values())

    def add(self, work: Work) -> None:
        self._of_version.setdefault(work.version, {})[work] = None
        self._count += 1

    @property
    def oldest(self) -> list[Work]:
        firsts = (next(iter(works)) for works in self._of_version.values())
        return sorted(firsts, key=lambda work: work.arrived)

    def work_of(self, version: LoadableVersion) -> Iterable[Work]:
        return self._of_version.get(version, {})

    def take(
        self, version: LoadableVersion, matches: Callable[[Work], bool] = lambda _: True
    ) -> list[Work]:
        works = self._of_version.get(version, {})
        taken = [work for work in works if matches(work)]
        for work in taken:
            del works[work]
        self._count -= len(taken)
        if not works:
            self._of_version.pop(version, None)
        return taken

    def update(self, version: LoadableVersion, matches: Callable[[Work], bool]) -> None:
        """Let matching work need this version instead, in the order of arrival."""
        taken = []
        for older in {work.version for work in self if matches(work)}:
            taken += self.take(older, matches)
        for work in taken:
            work.update(version)
        if taken:
            for work in sorted([*taken, *self.take(version)], key=lambda work: work.arrived):
                self.add(work)

    def clear(self) -> None:
        self._of_version.clear()
        self._count = 0

    def drop_cancelled(self) -> None:
        for version in list(self._of_version):
            self.take(version, lambda work: work.future.cancelled())


class SubmissionQueue:
    """Hands work from any thread to the engine's thread, the only caller of `take_submissions`."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Work | QueuedSwitch | None] = SimpleQueue()
        self._refusal: TandemError | None = None

    def __len__(self) -> int:
        return self._queue.qsize()

    def put(self, work: Work | QueuedSwitch) -> None:
        """Add work. A closed queue fails it at once."""
        work.future.add_done_callback(self._note_end)
        self._queue.put(work)
        if self._refusal is not None:
            self.close(self._refusal)

    def notify(self) -> None:
        """Let a waiting `take_submissions` return."""
        self._queue.put(None)

    def _note_end(self, future: Future[_Result]) -> None:
        if future.cancelled():
            self.notify()

    def close(self, refusal: TandemError) -> None:
        """Fail all queued and future work."""
        self._refusal = refusal
        for each in self._drain():
            each.fail(refusal)

    def take_submissions(
        self, *, wait: bool, seconds: float | None = None
    ) -> list[Work | QueuedSwitch]:
        """Return new work. With `wait`, block for it or a notification, at most `seconds`.

        An idle engine waits without a deadline, because the process ends with it."""
        first = []
        if wait:
            with suppress(Empty):
                first = [self._queue.get(timeout=seconds)]
        taken = [each for each in (*first, *self._drain()) if each is not None]
        if wait and taken:
            self._await_burst()
            taken += self._drain()
        return taken

    def _drain(self) -> list[Work | QueuedSwitch]:
        drained = []
        with suppress(Empty):
            while True:
                drained.append(self._queue.get_nowait())
        return [each for each in drained if each is not None]

    def _await_burst(self) -> None:
        """Let a burst of requests arrive before an idle engine's first step.

        A step costs nearly the same for one request as for fifty."""
        deadline = time.monotonic() + _BURST_LONGEST_SECONDS
        seen = -1
        while seen != len(self) and time.monotonic() < deadline:
            seen = len(self)
            time.sleep(_BURST_QUIET_SECONDS)
