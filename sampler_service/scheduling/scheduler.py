"""Decides which request runs when, and when the engine switches to another weight version.

One thread owns the engine: it admits requests, steps, answers, and changes the weights. Other
threads call `submit`, `load` and `cancel`, which return at once; the answer is a
`concurrent.futures.Future`.

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
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import groupby

from sampler_service.engine import Engine, EngineResult, EngineState
from sampler_service.metrics import SamplerMetrics
from sampler_service.scheduling.queue import (
    QueuedLoad,
    QueuedSample,
    Sampled,
    SampleJob,
    SubmissionQueue,
    Work,
)
from sampler_service.scheduling.weight_switch import WeightsLost, WeightSwitch
from sampler_service.weights.adapters import AdapterCache
from sampler_service.weights.loader import Loader, LoadOutcome, WeightVersion
from tandem.errors import LoadFailed, TandemError, WorkerDied
from tandem.telemetry import get_log


@dataclass(frozen=True)
class Status:
    state: EngineState
    version: WeightVersion
    running: int
    waiting: int
    adapters: tuple[str, ...] = ()


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
        metrics: SamplerMetrics,
        clock: Callable[[], float] = time.monotonic,
        on_fatal: Callable[[TandemError], None] = lambda _: None,
    ) -> None:
        """`base` is the base model, which the engine was started with. `patience` is in seconds.
        `on_fatal` is called once, in the engine's thread, when the engine has failed."""
        self._engine = engine
        self._adapters = adapters
        self._base = base
        self._weights = WeightSwitch(loader, adapters, version=base, metrics=metrics)
        self._patience = patience
        self._metrics = metrics
        self._clock = clock
        self._on_fatal = on_fatal
        self._log = get_log()
        self._submissions = SubmissionQueue()
        self._waiting: list[Work] = []
        self._running: dict[str, QueuedSample] = {}
        self._adapter_names: tuple[str, ...] = ()

    # --- Called from any thread ------------------------------------------------------------

    def submit(self, job: SampleJob) -> Future[Sampled]:
        work = QueuedSample(
            version=job.version,
            weights=self._weights_for(job.version),
            arrived=self._clock(),
            job=job,
        )
        self._submissions.put(work)
        return work.future

    def load(self, version: WeightVersion) -> Future[LoadOutcome]:
        """Load a version; the future ends when it serves, at once if it does already. Cancelling
        the future before its turn leaves the engine as it is."""
        work = QueuedLoad(
            version=version, weights=self._weights_for(version), arrived=self._clock()
        )
        self._submissions.put(work)
        return work.future

    def cancel(self, request_id: str) -> None:
        """Drop a request, waiting or running, without an answer."""
        self._submissions.cancel(request_id)

    @property
    def status(self) -> Status:
        return Status(
            state=self._weights.state,
            version=self._weights.version,
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
            while self._weights.state is not EngineState.FAILED:
                self.turn()
        except Exception as error:  # noqa: BLE001 (an engine may raise anything, and is lost then)
            self._log.exception("engine_failed")
            self._weights.engine_failed()
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
        """Move new work to the waiting list and drop cancelled work; block if there is none."""
        busy = self._running or self._waiting or self._adapters.verifying
        work, cancelled = self._submissions.take(wait=not busy)
        self._waiting += work
        if cancelled:
            self._withdraw(lambda w: isinstance(w, QueuedSample) and w.job.request.id in cancelled)
            running = [id_ for id_ in cancelled if self._running.pop(id_, None) is not None]
            self._engine.abort(running)
        self._withdraw(lambda w: w.future.cancelled())  # a load has no id to be cancelled by

    def _withdraw(self, matches: Callable[[Work], bool]) -> list[Work]:
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
            work
            for work in self._waiting
            if work.weights == self._weights.version and work.arrived <= limit
        }
        self._add_adapters(candidates)
        admitted = self._withdraw(lambda work: work in candidates and self._serves(work.version))
        samples = []
        for work in admitted:
            if isinstance(work, QueuedSample):
                samples.append(work)
            else:
                work.succeed(LoadOutcome(work.version, 0, 0.0, math.nan))
        for work in sorted(samples, key=lambda sample: sample.order):
            self._start(work)

    def _is_blocked(self, work: Work) -> bool:
        """Whether work needs other weights, or the room of another adapter."""
        if work.weights != self._weights.version:
            return True
        missing = work.version.adapter and work.version not in self._adapters
        return missing and self._adapters.full

    def _serves(self, version: WeightVersion) -> bool:
        if version.adapter:
            return self._adapters.ready(version)
        return version == self._weights.version

    def _add_adapters(self, candidates: set[Work]) -> None:
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
                self._adapter_added(outcome)

    def _adapter_added(self, outcome: LoadOutcome) -> None:
        self._metrics.adapter_added(outcome)
        self._weights.log_loaded(outcome)
        self._finish_loads(outcome)

    def _adapter_failed(self, version: WeightVersion, error: LoadFailed) -> None:
        self._weights.record_failure(version, error)
        for work in self._withdraw(lambda work: work.version == version):
            work.fail(error)

    def _finish_loads(self, outcome: LoadOutcome) -> None:
        for work in self._waiting:
            if isinstance(work, QueuedLoad) and work.version == outcome.version:
                work.succeed(outcome)
        self._withdraw(lambda work: work.future.done())

    def _start(self, work: QueuedSample) -> None:
        """Hand a request to the engine."""
        if not work.future.set_running_or_notify_cancel():
            return
        request = work.job.request
        if work.version.adapter:
            self._adapters.touch(work.version)
            request = replace(request, adapter=work.version.name)
        try:
            self._engine.add(request)
        except TandemError as error:
            work.future.set_exception(error)
            return
        work.admitted = self._clock()
        self._running[request.id] = work

    def _step(self) -> None:
        started = time.perf_counter()
        output = self._engine.step()
        self._metrics.stepped(seconds=time.perf_counter() - started)
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
                self._adapter_added(outcome)

    def _answer(self, work: QueuedSample, result: EngineResult) -> None:
        if result.failure is not None:
            work.future.set_exception(result.failure)
            return
        seconds = self._clock() - work.admitted
        work.future.set_result(Sampled(result=result, version=work.version, seconds=seconds))

    def _switch_weights(self) -> None:
        """Load the oldest waiter's weights; the engine is idle."""
        waiting = [work for work in self._waiting if work.weights != self._weights.version]
        if not waiting:
            # An adapter found no room beside those of other candidates, and none of these entered
            # the engine (loads, refusals): the next turn has room.
            return
        # Work for the loaded weights was admitted before, or arrived after one of these.
        target = min(waiting, key=lambda work: work.arrived).weights
        try:
            outcome = self._weights.switch_to(target)
        except WeightsLost as error:
            self._fail(error)
        except LoadFailed as error:
            for work in self._withdraw(lambda work: work.weights == target):
                work.fail(error)
        else:
            self._finish_loads(outcome)

    def _fail(self, error: TandemError) -> None:
        """Refuse everything, now and later, and report the failure."""
        self._submissions.close(error)
        for waiting in self._withdraw(lambda _: True):
            waiting.fail(error)
        for running in self._running.values():
            running.future.set_exception(error)
        self._running = {}
        self._on_fatal(error)
