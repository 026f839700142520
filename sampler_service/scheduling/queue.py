"""The work that the scheduler is given, and its way from any thread to the engine's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sampler_service.engine import EngineDelta, EngineRequest, EngineResult
from sampler_service.weights.loader import LoadOutcome, WeightVersion
from tandem.errors import TandemError

_Result = TypeVar("_Result")

_BURST_QUIET_SECONDS = 0.001
_BURST_LONGEST_SECONDS = 0.050


@dataclass(frozen=True)
class SampleJob:
    """A request for a version. Requests that wait together are admitted by (session, seq_id).

    `on_deltas` is called in the engine's thread with the deltas of a streamed request after each
    step, the last time before the future is resolved. It must return at once.
    """

    request: EngineRequest
    version: WeightVersion
    session_id: str
    seq_id: int
    on_deltas: Callable[[Sequence[EngineDelta]], None] | None = None


@dataclass(frozen=True)
class Sampled:
    """The result of a request and the version that computed it. `seconds` counts from its admission
    into the engine."""

    result: EngineResult
    version: WeightVersion
    seconds: float


@dataclass(eq=False, kw_only=True)
class Queued(Generic[_Result]):
    """Work in the queue. `weights` is the version that must be loaded for it: its own, or the base
    model for an adapter. `arrived` is in seconds of the scheduler's clock."""

    version: WeightVersion
    weights: WeightVersion
    arrived: float
    future: Future[_Result] = field(default_factory=Future)

    def succeed(self, result: _Result) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(result)

    def fail(self, error: TandemError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(eq=False, kw_only=True)
class QueuedSample(Queued[Sampled]):
    """A request; `admitted` is when it entered the engine."""

    job: SampleJob
    admitted: float = 0.0

    @property
    def order(self) -> tuple[str, int, float]:
        return (self.job.session_id, self.job.seq_id, self.arrived)


class QueuedLoad(Queued[LoadOutcome]):
    """An explicit load of a version."""


Work = QueuedSample | QueuedLoad


class SubmissionQueue:
    """Hands work and cancellations to the engine's thread, which alone calls `take`."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._work: list[Work] = []
        self._cancelled: list[str] = []
        self._refusal: TandemError | None = None

    def __len__(self) -> int:
        return len(self._work)

    def put(self, work: Work) -> None:
        """Add work; fail it at once if the queue is closed."""
        with self._condition:
            refusal = self._refusal
            if refusal is None:
                self._work.append(work)
                self._condition.notify()
        if refusal is not None:
            work.fail(refusal)

    def cancel(self, request_id: str) -> None:
        with self._condition:
            self._cancelled.append(request_id)
            self._condition.notify()

    def close(self, refusal: TandemError) -> None:
        """Fail all work in the queue, and all that is put later."""
        with self._condition:
            self._refusal = refusal
            work, self._work = self._work, []
        for each in work:
            each.fail(refusal)

    def take(self, *, wait: bool) -> tuple[list[Work], frozenset[str]]:
        """Return new work and the ids of cancelled requests. With `wait`, block until there is
        something: an idle engine waits without a deadline, because the process ends with it."""
        if wait:
            with self._condition:
                self._condition.wait_for(lambda: self._work or self._cancelled)
            self._await_burst()
        with self._condition:
            work, self._work = self._work, []
            cancelled, self._cancelled = self._cancelled, []
        return work, frozenset(cancelled)

    def _await_burst(self) -> None:
        """Let a burst of requests arrive before the first step of an idle engine: a step costs
        nearly the same for one request as for fifty. Sleeping avoids waking up for each."""
        deadline = time.monotonic() + _BURST_LONGEST_SECONDS
        seen = 0
        while seen != len(self._work) and time.monotonic() < deadline:
            seen = len(self._work)
            time.sleep(_BURST_QUIET_SECONDS)
