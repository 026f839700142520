"""Decides which request runs when, and when the engine switches to another weight version.

One thread owns the engine: it admits requests, steps, answers, and changes the weights. Other
threads call `submit` and `load`, which return at once; the answer is a `concurrent.futures.Future`.
Cancelling the future drops a request, waiting or running, or a load before its turn.

- A request for the loaded version is admitted before the next step. Requests that wait together
  are admitted in the order of (session, seq_id), whatever order they arrived in.
- A request or a load that needs other weights waits until the engine is idle. Once the oldest has
  waited longer than `patience`, nothing that arrived after it is admitted. Then the engine switches
  to the oldest waiter's version. The same holds for an adapter that finds no room.
- An adapter needs the base model's weights. While these are loaded, it is added beside running
  requests (`weights/adapters.py`), and requests for several adapters and for the base model run
  together. While others are loaded, a request for an adapter waits for the base model.
- A load that fails leaves the previous version serving: untouched, or loaded again. Only work for
  the new version gets `LoadFailed`. If the previous version is lost as well, the state is `failed`
  and every request is refused.
- A request may take `timeout` from when the engine begins to compute it, however long it waited.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Generic, TypeVar

from sampler_service.engine import (
    Engine,
    EngineDelta,
    EngineRequest,
    EngineResult,
    EngineState,
    WeightsTouched,
)
from sampler_service.metrics import SamplerMetrics
from sampler_service.weights.adapters import AdapterCache
from sampler_service.weights.loader import Loader, LoadOutcome, WeightVersion
from tandem.errors import LoadFailed, OperationTimedOut, TandemError, WorkerDied
from tandem.telemetry import get_log

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


@dataclass(frozen=True)
class Status:
    state: EngineState
    version: WeightVersion
    running: int
    waiting: int
    adapters: tuple[str, ...] = ()


@dataclass(eq=False, kw_only=True)
class _Queued(Generic[_Result]):
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
class _QueuedSample(_Queued[Sampled]):
    """A request; `admitted` is when it entered the engine, `begun` when this began to compute
    it."""

    job: SampleJob
    admitted: float = 0.0
    begun: float = math.inf

    @property
    def order(self) -> tuple[str, int, float]:
        return (self.job.session_id, self.job.seq_id, self.arrived)


class _QueuedLoad(_Queued[LoadOutcome]):
    """An explicit load of a version."""


_Work = _QueuedSample | _QueuedLoad


class _SubmissionQueue:
    """Hands work from any thread to the engine's, which alone calls `take`."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._work: list[_Work] = []
        self._refusal: TandemError | None = None

    def __len__(self) -> int:
        return len(self._work)

    def put(self, work: _Work) -> None:
        """Add work; fail it at once if the queue is closed."""
        with self._condition:
            if self._refusal is None:
                self._work.append(work)
                self._condition.notify()
                return
        work.fail(self._refusal)

    def close(self, refusal: TandemError) -> None:
        """Fail all work in the queue, and all that is put later."""
        with self._condition:
            self._refusal = refusal
            work, self._work = self._work, []
        for each in work:
            each.fail(refusal)

    def take(self, *, wait: bool) -> list[_Work]:
        """Return new work. With `wait`, block until there is some: an idle engine waits without a
        deadline, because the process ends with it."""
        if wait:
            with self._condition:
                self._condition.wait_for(lambda: self._work)
            self._await_burst()
        with self._condition:
            work, self._work = self._work, []
        return work

    def _await_burst(self) -> None:
        """Let a burst of requests arrive before the first step of an idle engine: a step costs
        nearly the same for one request as for fifty. Sleeping avoids waking up for each."""
        deadline = time.monotonic() + _BURST_LONGEST_SECONDS
        seen = 0
        while seen != len(self._work) and time.monotonic() < deadline:
            seen = len(self._work)
            time.sleep(_BURST_QUIET_SECONDS)


class Scheduler:
    """Runs an engine in the thread that calls `run`. After the engine itself has failed, nothing is
    served."""

    def __init__(
        self,
        engine: Engine,
        loader: Loader,
        adapters: AdapterCache,
        *,
        base: WeightVersion,
        patience: float,
        timeout: float,
        metrics: SamplerMetrics,
        clock: Callable[[], float] = time.monotonic,
        on_fatal: Callable[[TandemError], None] = lambda _: None,
    ) -> None:
        """`base` is the base model, which the engine was started with. `patience` and `timeout`
        are in seconds. `on_fatal` is called once, in the engine's thread, when the engine has
        failed."""
        self._engine = engine
        self._loader = loader
        self._adapters = adapters
        self._base = base
        self._patience = patience
        self._timeout = timeout
        self._metrics = metrics
        self._clock = clock
        self._on_fatal = on_fatal
        self._log = get_log()
        self._submissions = _SubmissionQueue()
        self._waiting: list[_Work] = []
        self._running: dict[str, _QueuedSample] = {}
        self._adapter_names: tuple[str, ...] = ()
        self._loaded = base
        self._state = EngineState.AWAKE
        metrics.state(self._state)
        metrics.version(base)

    # --- Called from any thread ------------------------------------------------------------

    def submit(self, job: SampleJob) -> Future[Sampled]:
        work = _QueuedSample(
            version=job.version,
            weights=self._weights_for(job.version),
            arrived=self._clock(),
            job=job,
        )
        self._submissions.put(work)
        return work.future

    def load(self, version: WeightVersion) -> Future[LoadOutcome]:
        """Load a version; the future ends when it serves, at once if it does already."""
        work = _QueuedLoad(
            version=version, weights=self._weights_for(version), arrived=self._clock()
        )
        self._submissions.put(work)
        return work.future

    @property
    def status(self) -> Status:
        return Status(
            state=self._state,
            version=self._loaded,
            running=len(self._running),
            waiting=len(self._waiting) + len(self._submissions),
            adapters=self._adapter_names,
        )

    def _weights_for(self, version: WeightVersion) -> WeightVersion:
        return self._base if version.adapter else version

    # --- The engine's thread ---------------------------------------------------------------

    def run(self) -> None:
        """Serve until the engine fails."""
        try:
            while self._state is not EngineState.FAILED:
                self.turn()
        except Exception as error:  # noqa: BLE001 (an engine may raise anything, and is lost then)
            self._log.exception("engine_failed")
            if self._state is not EngineState.FAILED:
                self._move_to(EngineState.FAILED)
            self._fail(WorkerDied(f"the engine failed: {error}"))

    def turn(self) -> None:
        """Take what has arrived, then do one thing: a step, a switch of weights, or a wait."""
        self._take()
        self._admit()
        if self._running or self._adapters.verifying:
            self._step()
        elif self._waiting:
            self._switch_weights()
        self._adapter_names = self._adapters.names
        self._metrics.queue(running=len(self._running), waiting=len(self._waiting))

    def _take(self) -> None:
        """Move new work to the waiting list, and drop work that was cancelled or takes too long;
        block if there is none."""
        busy = self._running or self._waiting or self._adapters.verifying
        self._waiting += self._submissions.take(wait=not busy)
        self._withdraw(lambda work: work.future.cancelled())
        latest = self._clock() - self._timeout
        ended = [
            id_
            for id_, work in self._running.items()
            if work.future.cancelled() or work.begun < latest
        ]
        for id_ in ended:
            self._running.pop(id_).fail(
                OperationTimedOut(
                    f"the engine did not end the sample within {self._timeout:g} s; ask for fewer "
                    "or shorter samples at once, or raise TANDEM_SAMPLER_OPERATION_TIMEOUT"
                )
            )
        if ended:
            self._engine.abort(ended)

    def _withdraw(self, matches: Callable[[_Work], bool]) -> list[_Work]:
        """Remove matching work from the waiting list and return it."""
        withdrawn = {work: None for work in self._waiting if matches(work)}
        if withdrawn:
            self._waiting = [work for work in self._waiting if work not in withdrawn]
        return list(withdrawn)

    def _admit(self) -> None:
        """Admit the work that the loaded weights and adapters serve, but nothing that arrived after
        blocked work that is out of patience; start to add missing adapters."""
        blocked = [work.arrived for work in self._waiting if self._is_blocked(work)]
        limit = math.inf
        if blocked and self._clock() - min(blocked) > self._patience:
            limit = min(blocked)
        candidates = {
            work for work in self._waiting if work.weights == self._loaded and work.arrived <= limit
        }
        self._add_adapters(candidates)
        admitted = self._withdraw(lambda work: work in candidates and self._serves(work.version))
        samples = []
        for work in admitted:
            if isinstance(work, _QueuedSample):
                samples.append(work)
            else:
                work.succeed(LoadOutcome(work.version, 0, 0.0, math.nan))
        for work in sorted(samples, key=lambda sample: sample.order):
            self._start(work)

    def _is_blocked(self, work: _Work) -> bool:
        """Whether work needs other weights, or the room of another adapter."""
        if work.weights != self._loaded:
            return True
        missing = work.version.adapter and work.version not in self._adapters
        return missing and self._adapters.full

    def _serves(self, version: WeightVersion) -> bool:
        if version.adapter:
            return self._adapters.ready(version)
        return version == self._loaded

    def _add_adapters(self, candidates: set[_Work]) -> None:
        """Start to add the adapters that candidates wait for, in the order of their arrival, as far
        as there is room. No adapter is evicted that running work or a candidate needs."""
        missing: dict[str, WeightVersion] = {}
        for work in sorted(candidates, key=lambda work: work.arrived):
            if work.version.adapter and work.version not in self._adapters:
                missing.setdefault(work.version.name, work.version)
        needed = {work.version.name for work in (*self._running.values(), *candidates)}
        for version in missing.values():
            if not self._adapters.make_room(needed=needed):
                return
            try:
                outcome = self._adapters.add(version)
            except LoadFailed as error:
                self._adapter_failed(version, error)
                continue
            if outcome is not None:
                self._serving(outcome)

    def _adapter_failed(self, version: WeightVersion, error: LoadFailed) -> None:
        self._record_failure(version, error)
        for work in self._withdraw(lambda work: work.version == version):
            work.fail(error)

    def _serving(self, outcome: LoadOutcome) -> None:
        """Record that a version or an adapter serves, and answer its loads."""
        self._metrics.loaded(outcome)
        self._log.info(
            "loaded",
            version=outcome.version.name,
            seconds=round(outcome.seconds, 4),
            bytes=outcome.bytes,
            canary_difference=outcome.canary_difference,
        )
        for work in self._waiting:
            if isinstance(work, _QueuedLoad) and work.version == outcome.version:
                work.succeed(outcome)
        self._withdraw(lambda work: work.future.done())

    def _start(self, work: _QueuedSample) -> None:
        """Hand a request to the engine."""
        request = work.job.request
        if work.version.adapter:
            self._adapters.touch(work.version)
            request = replace(request, adapter=work.version.name)
        try:
            self._engine.add(request)
        except TandemError as error:
            work.fail(error)
            return
        work.admitted = self._clock()
        self._running[request.id] = work

    def _step(self) -> None:
        started = time.perf_counter()
        output = self._engine.step()
        self._metrics.stepped(seconds=time.perf_counter() - started)
        for id_ in output.begun:
            if work := self._running.get(id_):  # else a canary
                work.begun = self._clock()
        for id_, deltas in groupby(output.deltas, key=lambda delta: delta.id):
            on_deltas = self._running[id_].job.on_deltas
            if on_deltas is not None:
                on_deltas(list(deltas))
        for result in output.results:
            canary = self._adapters.take_canary(result)
            if canary is None:
                self._answer(self._running.pop(result.id), result)
                continue
            version, outcome = canary
            if isinstance(outcome, LoadFailed):
                self._adapter_failed(version, outcome)
            else:
                self._serving(outcome)

    def _answer(self, work: _QueuedSample, result: EngineResult) -> None:
        if result.failure is not None:
            work.fail(result.failure)
            return
        seconds = self._clock() - work.admitted
        work.succeed(Sampled(result=result, version=work.version, seconds=seconds))

    def _switch_weights(self) -> None:
        """Load the oldest waiter's weights; the engine is idle."""
        waiting = [work for work in self._waiting if work.weights != self._loaded]
        if not waiting:
            # An adapter found no room beside those of other candidates, and none of these entered
            # the engine (loads, refusals): the next turn has room.
            return
        # Work for the loaded weights was admitted before, or arrived after one of these.
        target = min(waiting, key=lambda work: work.arrived).weights
        self._move_to(EngineState.LOADING)
        try:
            outcome = self._loader.load(target)
        except LoadFailed as error:
            self._record_failure(target, error)
            if isinstance(error, WeightsTouched) and not self._restore(error):
                return
            self._move_to(EngineState.AWAKE)
            for work in self._withdraw(lambda work: work.weights == target):
                work.fail(LoadFailed(error.message))
            return
        self._adapters.clear()
        self._loaded = target
        self._move_to(EngineState.AWAKE)
        self._serving(outcome)

    def _restore(self, cause: WeightsTouched) -> bool:
        """Load the previous version again. Return False, and refuse everything, if that fails."""
        self._adapters.clear()
        try:
            self._loader.load(self._loaded)
        except LoadFailed as error:
            self._move_to(EngineState.FAILED)
            self._log.error("restore_failed", version=self._loaded.name, error=error.message)
            self._fail(
                LoadFailed(
                    f"{cause.message}; {self._loaded.name}, which served before, could not be "
                    f"loaded again: {error.message}"
                )
            )
            return False
        self._log.info("restored", version=self._loaded.name)
        return True

    def _record_failure(self, version: WeightVersion, error: LoadFailed) -> None:
        self._metrics.load_failed()
        self._log.error("load_failed", version=version.name, error=error.message)

    def _move_to(self, state: EngineState) -> None:
        self._state = self._state.move_to(state)
        self._metrics.state(state)

    def _fail(self, error: TandemError) -> None:
        """Refuse everything, now and later, and report the failure."""
        self._submissions.close(error)
        for work in (*self._waiting, *self._running.values()):
            work.fail(error)
        self._waiting, self._running = [], {}
        self._on_fatal(error)
