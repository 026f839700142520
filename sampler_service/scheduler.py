"""Decides when each request runs, and when the engine loads weights, sleeps and wakes.

One thread owns the engine. Other threads call `submit`, `load`, `sleep` and `wake`, which return a
future at once. Cancelling it drops a request at any time, and a load or switch before its turn.

- A request for the loaded version is admitted before the next step, in the order of (session,
  seq_id).
- If the oldest waiting work needs other weights, a thread reads and verifies them meanwhile
  (`weights/read_ahead.py`). If that fails, only the work fails.
- Then the switch waits until the engine is idle. After `patience`, later work is not admitted
  before it. This also holds for an adapter without room.
- In-flight work names the oldest version that it accepts. It does not drain for newer versions of
  its run (`updates.py`). If only such work runs, the engine pauses, takes the weights and
  continues. A change of adapter happens between two steps. Work never returns to an older version.
- Adapters are read in a thread too. They need the base model's weights, and are added beside
  running requests (`weights/adapters.py`).
- After a failed load the previous version serves. Only work for the new version gets `LoadFailed`.
  If the previous version is lost too, the state is `failed`.
- A sleep waits for running requests, and admits no others. Sleeps and wakes keep their order.
- A wake loads at most once: the named version, else the oldest waiter's, else the previous one.
- `timeout` limits a request's computation, and the reading of weights."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import groupby

from sampler_service.engine import (
    Engine,
    EngineResult,
    EngineState,
    EngineUse,
    SleepLevel,
    StepOutput,
)
from sampler_service.lifecycle import EngineLifecycle, NothingToServe, SwitchReport
from sampler_service.metrics import SamplerMetrics
from sampler_service.updates import InFlightWork
from sampler_service.weights.adapters import AdapterCache
from sampler_service.weights.loader import (
    LoadableVersion,
    Loader,
    LoadOutcome,
    default_tolerance,
)
from sampler_service.weights.read_ahead import ReadAhead, in_thread
from sampler_service.work import (
    QueuedLoad,
    QueuedSample,
    QueuedSleep,
    QueuedSwitch,
    QueuedWake,
    Sampled,
    SampleJob,
    SubmissionQueue,
    WaitingList,
    Work,
    request_ids,
)
from tandem.errors import LoadFailed, OperationTimedOut, TandemError, WorkerDied, describe
from tandem.telemetry import get_log


@dataclass(frozen=True)
class SchedulerStatus:
    state: EngineState
    version: LoadableVersion
    running: int
    waiting: int
    adapters: tuple[str, ...]
    load: EngineUse


_PATIENCE = 2.0
"""Seconds during which requests for the loaded version may overtake others."""


class Scheduler:
    """Runs an engine in the thread that calls `run`."""

    def __init__(
        self,
        engine: Engine,
        loader: Loader,
        adapters: AdapterCache,
        *,
        base: LoadableVersion,
        patience: float,
        timeout: float,
        metrics: SamplerMetrics,
        clock: Callable[[], float] = time.monotonic,
        on_fatal: Callable[[TandemError], None] = lambda _: None,
        start_reading: Callable[[Callable[[], None]], None] = in_thread,
    ) -> None:
        """The engine was started with `base`. `patience` and `timeout` are in seconds.

        `on_fatal` is called once, in the engine's thread, when the engine fails. `start_reading`
        runs a function that reads weights."""
        self._engine = engine
        self._adapters = adapters
        self._base = base
        self._patience = patience
        self._timeout = timeout
        self._metrics = metrics
        self._clock = clock
        self._on_fatal = on_fatal
        self._log = get_log()
        self._submissions = SubmissionQueue()
        self._switches: deque[QueuedSwitch] = deque()
        self._waiting = WaitingList()
        self._has_cancelled = False
        self._running: dict[str, QueuedSample] = {}
        self._in_flight = InFlightWork(
            engine, metrics, waiting=self._waiting, running=self._running
        )
        self._adapter_names: tuple[str, ...] = ()
        self._load_of_engine = EngineUse()
        self._reader, self._adapter_reader = (
            ReadAhead(
                verify,
                timeout=timeout,
                clock=clock,
                on_done=self._submissions.notify,
                start=start_reading,
            )
            for verify in (loader.verify, adapters.verify)
        )
        self._lifecycle = EngineLifecycle(
            engine, loader, self._reader, adapters, base=base, on_state=metrics.state
        )
        metrics.version(base)
        self._stopping: TandemError | None = None

    @classmethod
    def of_engine(
        cls,
        engine: Engine,
        *,
        base: LoadableVersion,
        timeout: float,
        metrics: SamplerMetrics,
        on_fatal: Callable[[TandemError], None],
    ) -> Scheduler:
        tolerance = default_tolerance(engine.facts.dtype)
        return cls(
            engine,
            Loader(engine, base=base.path, tolerance=tolerance),
            AdapterCache(engine, base=base.path, tolerance=tolerance),
            base=base,
            patience=_PATIENCE,
            timeout=timeout,
            metrics=metrics,
            on_fatal=on_fatal,
        )

    # --- Called from any thread ------------------------------------------------------------

    def submit(self, job: SampleJob) -> Future[Sampled]:
        work = QueuedSample(
            version=job.version,
            weights=self._weights_for(job.version),
            in_flight=job.in_flight,
            updates=job.updates,
            arrived=self._clock(),
            job=job,
        )
        self._put(work)
        return work.future

    def load(self, version: LoadableVersion, *, in_flight: bool = False) -> Future[LoadOutcome]:
        """Load a version. The future ends when it serves.

        For an `in_flight` load, a newer version of the run will do. The outcome names it."""
        work = QueuedLoad(
            version=version,
            weights=self._weights_for(version),
            in_flight=in_flight,
            arrived=self._clock(),
        )
        self._put(work)
        return work.future

    def _put(self, work: Work) -> None:
        work.future.add_done_callback(self._note_cancelled)
        self._submissions.put(work)

    def _note_cancelled(self, future: Future[Sampled] | Future[LoadOutcome]) -> None:
        if future.cancelled():
            self._has_cancelled = True

    def sleep(self, level: SleepLevel) -> Future[SwitchReport]:
        """Put the engine to sleep after its running requests."""
        switch = QueuedSleep(arrived=self._clock(), level=level)
        self._submissions.put(switch)
        return switch.future

    def wake(self, version: LoadableVersion | None = None) -> Future[SwitchReport]:
        """Wake the engine. The module describes the choice of version."""
        switch = QueuedWake(
            arrived=self._clock(), weights=None if version is None else self._weights_for(version)
        )
        self._submissions.put(switch)
        return switch.future

    def stop_scheduling(self, reason: TandemError) -> None:
        """Let `run` return after the present turn, and fail all work with `reason`."""
        self._stopping = reason
        self._submissions.notify()

    @property
    def status(self) -> SchedulerStatus:
        return SchedulerStatus(
            state=self._lifecycle.state,
            version=self._loaded,
            running=len(self._running),
            waiting=len(self._waiting) + len(self._submissions),
            adapters=self._adapter_names,
            load=self._load_of_engine if self._running else EngineUse(),
        )

    @property
    def _loaded(self) -> LoadableVersion:
        return self._lifecycle.loaded

    def _weights_for(self, version: LoadableVersion) -> LoadableVersion:
        return self._base if version.adapter else version

    # --- The engine's thread ---------------------------------------------------------------

    def run(self) -> None:
        try:
            while self._lifecycle.state is not EngineState.FAILED and self._stopping is None:
                self.turn()
        except Exception as error:  # noqa: BLE001 (an engine may raise anything, and is lost then)
            running = request_ids(self._running.values())
            self._log.exception("engine_failed", request_ids=running)
            self._lifecycle.fail()
            self._fail(WorkerDied(f"the engine failed: {describe(error)}"))
        if self._stopping is not None:
            self._fail(self._stopping)

    def turn(self) -> None:
        """Take new work, then do one thing: step, switch, load or wait."""
        self._take()
        self._read_ahead()
        if not self._sleep_due:
            self._admit()
        try:
            target = None if self._sleep_due else self._ready_weights
            if target is not None and self._can_load(target):
                self._load(target)
            elif self._running or self._adapters.verifying:
                self._step()
            elif self._switches:
                self._switch()
        except NothingToServe as error:
            self._fail(LoadFailed(error.message))
        self._adapter_names = self._adapters.names
        self._metrics.queue(running=len(self._running), waiting=len(self._waiting))

    @property
    def _asleep(self) -> bool:
        return self._lifecycle.state is EngineState.ASLEEP

    @property
    def _sleep_due(self) -> bool:
        """Whether admission is closed: the engine is asleep, or a switch waits."""
        return self._asleep or bool(self._switches)

    @property
    def _idle(self) -> bool:
        """Whether only new work or the end of a reading gives something to do."""
        if self._running or self._adapters.verifying or self._switches:
            return False
        adapter, target = self._next_adapter, self._next_weights
        if adapter is not None and adapter != self._adapter_reader.wanted:
            return False  # its reading begins in the next turn
        reading = target is None or target == self._reader.wanted
        if self._asleep:
            return reading
        for work in self._waiting.oldest:
            if work.weights == self._loaded and not self._awaits_reading(work):
                # An adapter can find no room beside candidates that then never enter the engine,
                # such as loads. The next turn has room.
                return False
        return reading and self._ready_weights is None

    @property
    def _next_weights(self) -> LoadableVersion | None:
        """The weights of the oldest waiting work that needs others. An adapter counts after its
        reading."""
        needed = (
            work.weights
            for work in self._waiting.oldest
            if not work.version.adapter or self._adapter_reader.has_verified(work.version)
        )
        return next((weights for weights in needed if weights != self._loaded), None)

    @property
    def _next_adapter(self) -> LoadableVersion | None:
        needed = (work.version for work in self._waiting.oldest if work.version.adapter)
        return next((version for version in needed if version not in self._adapters), None)

    def _awaits_reading(self, work: Work) -> bool:
        """Whether work needs an adapter that is being read, or is next."""
        missing = work.version.adapter and work.version not in self._adapters
        return missing and self._adapter_reader.seconds_left is not None

    @property
    def _ready_weights(self) -> LoadableVersion | None:
        target = self._next_weights
        return target if target is not None and self._reader.has_verified(target) else None

    def _can_load(self, target: LoadableVersion) -> bool:
        """Whether nothing runs, or only work that continues with these weights."""
        if self._adapters.verifying:
            return False
        if not self._running:
            return True
        return self._in_flight.may_run_beside(target)

    def _read_ahead(self) -> None:
        """Start to read the next weights and adapter. Fail the work of failed readings."""
        self._read(self._adapter_reader, lambda: self._next_adapter, self._adapter_failed)
        if not self._switches:  # a wake chooses its own weights
            self._read(self._reader, lambda: self._next_weights, self._weights_failed)

    def _read(
        self,
        reader: ReadAhead,
        wanted: Callable[[], LoadableVersion | None],
        failed: Callable[[LoadableVersion, LoadFailed], None],
    ) -> None:
        while (version := wanted()) is not None:
            reader.want(version)
            outcome = reader.outcome(version)
            if not isinstance(outcome, LoadFailed):
                return
            failed(version, outcome)
        reader.want(None)

    def _take(self) -> None:
        """Move new work to the waiting list, and drop cancelled or late work. Blocks while idle."""
        readers = (self._reader.seconds_left, self._adapter_reader.seconds_left)
        seconds = min((left for left in readers if left is not None), default=None)
        for each in self._submissions.take_submissions(wait=self._idle, seconds=seconds):
            if isinstance(each, QueuedSleep | QueuedWake):
                self._switches.append(each)
            else:
                self._in_flight.note_arrival(each)
                self._waiting.add(each)
        if self._has_cancelled:
            self._has_cancelled = False
            self._waiting.drop_cancelled()
        self._answer_switches()
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
                    "or shorter samples at once, or raise TANDEM_OPERATION_TIMEOUT"
                )
            )
        if ended:
            self._engine.abort(ended)

    def _answer_switches(self) -> None:
        """Drop cancelled switches, and answer leading ones without an effect."""
        self._switches = deque(each for each in self._switches if not each.future.cancelled())
        while self._switches and isinstance(self._switches[0], QueuedSleep) is self._asleep:
            self._switches.popleft().succeed(self._lifecycle.unchanged())

    def _admit(self) -> None:
        """Admit work for the loaded weights, and start to add missing adapters.

        Blocked work out of patience blocks later work."""
        oldest = self._waiting.oldest
        blocked = next((work.arrived for work in oldest if self._is_blocked(work)), math.inf)
        limit = blocked if self._clock() - blocked > self._patience else math.inf
        candidates = [
            work for work in oldest if work.weights == self._loaded and work.arrived <= limit
        ]
        self._add_adapters(candidates)
        samples = []
        for work in self._take_served(candidates, limit):
            if isinstance(work, QueuedSample):
                samples.append(work)
            else:
                work.succeed(LoadOutcome(work.version, 0, 0.0, math.nan))
        samples.sort(key=lambda sample: sample.order)
        # All are registered before the first enters the engine, so that a failure there answers
        # all.
        self._running.update({sample.job.request.id: sample for sample in samples})
        for sample in samples:
            self._start(sample)

    def _take_served(self, candidates: list[Work], limit: float) -> Iterator[Work]:
        """Take waiting work for each candidate's version that serves now."""
        for version in [candidate.version for candidate in candidates]:
            if self._serves(version):
                yield from self._waiting.take(version, lambda work: work.arrived <= limit)

    def _is_blocked(self, work: Work) -> bool:
        """Whether work waits for a switch, or for an adapter's room, with its weights read."""
        if work.weights != self._loaded:
            return self._reader.has_verified(work.weights)
        missing = work.version.adapter and work.version not in self._adapters
        return missing and self._adapters.full and self._adapter_reader.has_verified(work.version)

    def _serves(self, version: LoadableVersion) -> bool:
        if version.adapter:
            return self._adapters.ready(version)
        return version == self._loaded

    def _add_adapters(self, candidates: list[Work]) -> None:
        """Start to add candidates' adapters that were read and have room.

        Adapters of running work and candidates are not evicted."""
        versions = [candidate.version for candidate in candidates]
        missing = [each for each in versions if each.adapter and each not in self._adapters]
        if not missing:
            return
        needed = {work.version.name for work in (*self._running.values(), *candidates)}
        for version in missing:
            self._adapter_reader.want(version)
            read = self._adapter_reader.outcome(version)
            if read is None or not self._adapters.make_room(needed=needed):
                return
            try:
                outcome = self._adapters.load_adapter(self._adapter_reader.take_version(version))
            except LoadFailed as error:
                self._adapter_failed(version, error)
                continue
            if outcome is not None:
                self._serving(outcome)

    def _adapter_failed(self, version: LoadableVersion, error: LoadFailed) -> None:
        self._record_failure(version, error)
        for work in self._waiting.take(version):
            work.fail(error)

    def _serving(self, outcome: LoadOutcome) -> None:
        """Record that a version or adapter serves, and answer its loads."""
        self._metrics.loaded(outcome)
        self._log.info(
            "loaded",
            version=outcome.version.name,
            seconds=round(outcome.seconds, 4),
            bytes=outcome.bytes,
            canary_difference=outcome.canary_difference,
            handed_off=outcome.handed_off,
            handoff_failure=outcome.handoff_failure,
            request_ids=request_ids(self._waiting.work_of(outcome.version)),
        )
        if outcome.version.adapter and self._in_flight.concerns(outcome.version):
            self._take_output(self._engine.settle())  # for full weights, it is already paused
            self._take_output(self._in_flight.end_early(outcome.version))
        self._in_flight.carry_over(outcome)
        for load in self._waiting.take(outcome.version, lambda work: isinstance(work, QueuedLoad)):
            assert isinstance(load, QueuedLoad)
            load.succeed(outcome)

    def _start(self, work: QueuedSample) -> None:
        request = work.job.request
        if work.version.adapter:
            self._adapters.touch(work.version)
            request = replace(request, adapter=work.version.name)
        try:
            self._engine.add(request)
        except TandemError as error:
            del self._running[request.id]
            work.fail(error)
            return
        work.admitted = self._clock()

    def _step(self) -> None:
        started = time.perf_counter()
        output = self._engine.step()
        self._metrics.stepped(seconds=time.perf_counter() - started)
        self._take_output(output)

    def _take_output(self, output: StepOutput) -> None:
        if output.loads:
            self._load_of_engine = output.loads[-1]
        for id_ in output.begun:
            if work := self._running.get(id_):  # otherwise a canary
                work.begun = self._clock()
        for id_, deltas in groupby(output.deltas, key=lambda delta: delta.id):
            work = self._running[id_]
            if work.job.on_deltas is not None:
                work.job.on_deltas(list(deltas), work.version)
        canaries = []
        for result in output.results:
            if (canary := self._adapters.take_canary(result)) is not None:
                canaries.append(canary)
            else:
                self._answer(self._running.pop(result.id), result)
        for version, outcome in canaries:  # after the results: the rest may be carried over
            if isinstance(outcome, LoadFailed):
                self._adapter_failed(version, outcome)
            else:
                self._serving(outcome)

    def _answer(self, work: QueuedSample, result: EngineResult) -> None:
        if result.failure is not None:
            work.fail(result.failure)
            return
        seconds = self._clock() - work.admitted
        versions = (*work.before, work.version)
        work.succeed(Sampled(result=result, versions=versions, seconds=seconds))

    def _load(self, target: LoadableVersion) -> None:
        """Load weights that were read, and carry over running work, also after a failure."""
        self._take_output(self._engine.settle())
        self._take_output(self._in_flight.end_early(target))
        self._engine.pause()
        try:
            outcome = self._lifecycle.load(target)
        except NothingToServe as error:
            self._record_failure(target, error)
            raise
        except LoadFailed as error:
            self._weights_failed(target, error)
        else:
            self._serving(outcome)
        self._engine.resume()

    def _switch(self) -> None:
        switch = self._switches[0]
        if not switch.begin():
            return  # cancelled
        if isinstance(switch, QueuedSleep):
            self._take_output(self._engine.settle())  # no results: no request is running
            done = self._lifecycle.sleep(switch.level, drained=self._clock() - switch.arrived)
        else:
            done = self._wake(switch.weights)
        self._switches.popleft()
        self._metrics.switched(done)
        switch.succeed(done)

    def _wake(self, wanted: LoadableVersion | None) -> SwitchReport:
        oldest = next(iter(self._waiting.oldest), None)
        target = wanted or (self._loaded if oldest is None else oldest.weights)
        woken = self._lifecycle.wake(target)
        if woken.failure is not None:
            self._weights_failed(target, woken.failure)
        if woken.loaded is not None:
            self._serving(woken.loaded)
        return woken.switch

    def _weights_failed(self, version: LoadableVersion, error: LoadFailed) -> None:
        """Fail the work for weights that cannot be loaded."""
        self._record_failure(version, error)
        for first in [work for work in self._waiting.oldest if work.weights == version]:
            for work in self._waiting.take(first.version):
                work.fail(LoadFailed(error.message))

    def _record_failure(self, version: LoadableVersion, error: LoadFailed) -> None:
        self._metrics.load_failed()
        self._log.error(
            "load_failed",
            version=version.name,
            error=error.message,
            request_ids=request_ids(self._waiting.work_of(version)),
        )

    def _fail(self, error: TandemError) -> None:
        """Refuse all work, now and later, and report the failure."""
        self._submissions.close(error)
        for work in (*self._switches, *self._waiting, *self._running.values()):
            work.fail(error)
        self._switches = deque()
        self._waiting.clear()
        self._running.clear()
        self._on_fatal(error)
