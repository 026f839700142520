"""Which request runs when, and when the engine changes to another weight version.

One thread owns the engine: it admits requests, steps, answers, and changes the weights. Others
hand over work through `submit`, `load` and `cancel`, which return at once; answers come back
as a `concurrent.futures.Future`.

- A request for the loaded version is admitted before the next step. Requests that wait together
  are admitted in the order of (session, seq_id), whatever order they arrived in.
- A request or a load for other weights waits until the engine has drained, or, once the oldest
  has waited longer than `patience`, holds back everything that would be admitted before it.
  Then the engine changes over to the version of the oldest waiter.
  The same holds for a waiter whose adapter finds no room.
- An adapter rests upon the base model's weights. While those are loaded, it is added beside
  what runs (`adapters.py`), and requests for several adapters and for the base model run
  together. While others are loaded, a request for an adapter waits for the base model like any.
- A load that fails leaves the old version serving: untouched, or loaded again. Only those who
  asked for the new one get `LoadFailed`. If the old one cannot be had back, the state is
  `failed` and every request is refused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import groupby

from sampler_service.adapters import Adapters
from sampler_service.engine import Engine, EngineResult
from sampler_service.inbox import Inbox
from sampler_service.metrics import SamplerMetrics
from sampler_service.reload import Loader, LoadOutcome, Version
from sampler_service.turnover import Turnover, WeightsLost
from sampler_service.waiting import WaitingList
from sampler_service.work import Sampled, SampleJob, Status, Waiter
from tandem.errors import LoadFailed, TandemError, WorkerDied
from tandem.telemetry import get_log


class Scheduler:
    """Runs an engine. `start` spawns its thread unless the caller runs `run` in one of its own.

    `version` is the base model, which the engine was started with. `on_fatal` is called once
    when the engine itself has failed; nothing is served from then on.
    """

    def __init__(
        self,
        engine: Engine,
        loader: Loader,
        adapters: Adapters,
        *,
        version: Version,
        patience: float,
        metrics: SamplerMetrics,
        clock: Callable[[], float] = time.monotonic,
        on_fatal: Callable[[TandemError], None] = lambda _: None,
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._base = version
        self._turnover = Turnover(loader, adapters, version=version, metrics=metrics)
        self._patience = patience
        self._metrics = metrics
        self._clock = clock
        self._on_fatal = on_fatal
        self._log = get_log()
        self._inbox = Inbox()
        self._waiting = WaitingList()
        self._running: dict[str, Waiter] = {}
        self._names_of_adapters: tuple[str, ...] = ()

    # --- Called from any thread ------------------------------------------------------------

    def submit(self, job: SampleJob) -> Future[Sampled]:
        waiter = self._waiter(job.version, job)
        self._hand_over(waiter)
        return waiter.sampled

    def load(self, version: Version) -> Future[LoadOutcome]:
        """Ends when the version serves. A version that is loaded already ends at once. Whoever
        cancels the future before its turn leaves the engine as it is."""
        waiter = self._waiter(version, None)
        self._hand_over(waiter)
        return waiter.loaded

    def cancel(self, request_id: str) -> None:
        """Forgets a request, wherever it is. Nobody waits for its answer any more."""
        self._inbox.cancel(request_id)

    def stop(self) -> None:
        self._inbox.stop()

    @property
    def status(self) -> Status:
        return Status(
            state=self._turnover.state,
            version=self._turnover.version,
            running=len(self._running),
            waiting=len(self._waiting) + len(self._inbox),
            adapters=self._names_of_adapters,
        )

    def _waiter(self, version: Version, job: SampleJob | None) -> Waiter:
        weights = self._base if version.adapter else version
        return Waiter(version=version, weights=weights, arrived=self._clock(), job=job)

    def _hand_over(self, waiter: Waiter) -> None:
        refusal = self._inbox.put(waiter)
        if refusal is not None:
            waiter.fail(refusal)

    # --- The engine's thread ---------------------------------------------------------------

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self.run, name="engine", daemon=True)
        thread.start()
        return thread

    def run(self) -> None:
        """Serves until `stop`, or until the engine fails."""
        try:
            while self.turn():
                pass
        except Exception as error:  # noqa: BLE001 (an engine may raise anything, and is then lost)
            self._log.exception("engine_failed")
            refusal = WorkerDied(f"the engine failed: {error}")
            self._turnover.fail()
            self._refuse_all(refusal)
            self._on_fatal(refusal)

    def turn(self) -> bool:
        """Takes what has arrived and does one thing: a step, a change-over, or a wait.

        False when the scheduler was stopped.
        """
        if not self._take():
            self._refuse_all(WorkerDied("the sampler is stopping"))
            return False
        self._admit()
        if self._running or self._adapters.proving:
            self._step()
        elif self._waiting:
            self._change_over()
        self._names_of_adapters = self._adapters.names
        self._metrics.queue(running=len(self._running), waiting=len(self._waiting))
        return True

    def _take(self) -> bool:
        """Moves what arrived into the waiting list; with nothing to do, waits for something."""
        busy = self._running or self._waiting or self._adapters.proving
        arrivals = self._inbox.take() if busy else self._inbox.wait()
        if arrivals is None:
            return False
        self._waiting.extend(arrivals.waiters)
        if arrivals.cancelled:
            self._forget(arrivals.cancelled)
        self._waiting.drop_given_up()  # nothing is loaded for nobody
        return True

    def _forget(self, ids: frozenset[str]) -> None:
        self._waiting.forget(ids)
        running = [id_ for id_ in ids if id_ in self._running]
        for id_ in running:
            del self._running[id_]
        self._engine.abort(running)

    def _admit(self) -> None:
        """Admits what the loaded weights and adapters serve, except behind a waiter out of
        patience; begins to add the adapters that others wait for."""
        held_up = [w.arrived for w in self._waiting if self._held_up(w)]
        limit = float("inf")
        if held_up and self._clock() - min(held_up) > self._patience:
            limit = min(held_up)
        at_hand = [
            w for w in self._waiting if w.weights == self._turnover.version and w.arrived <= limit
        ]
        self._add_adapters(at_hand)
        still = set(self._waiting)
        now = [w for w in at_hand if w in still and self._serves(w.version)]
        if not now:
            return
        for version in {w.version for w in now if w.job is None}:
            self._waiting.answer_loads(LoadOutcome(version, 0, 0.0, float("nan")))
        self._waiting.remove(now)
        for waiter in sorted((w for w in now if w.job is not None), key=lambda w: w.order):
            self._start(waiter)

    def _held_up(self, waiter: Waiter) -> bool:
        """Whether it needs other weights, or room for its adapter that others take up."""
        if waiter.weights != self._turnover.version:
            return True
        new = waiter.version.adapter and waiter.version not in self._adapters
        return new and self._adapters.full

    def _serves(self, version: Version) -> bool:
        return (
            self._adapters.ready(version) if version.adapter else version == self._turnover.version
        )

    def _start(self, waiter: Waiter) -> None:
        """Hands a request to the engine."""
        assert waiter.job is not None
        if not waiter.sampled.set_running_or_notify_cancel():
            return
        request = waiter.job.request
        if waiter.version.adapter:
            self._adapters.touch(waiter.version)
            request = replace(request, adapter=waiter.version.name)
        try:
            self._engine.add(request)
        except TandemError as error:
            waiter.sampled.set_exception(error)
            return
        waiter.admitted = self._clock()
        self._running[request.id] = waiter

    def _add_adapters(self, at_hand: list[Waiter]) -> None:
        """Begins to add the adapters of those who wait for one, the oldest waiter's first, as far
        as there is room: none leaves that anybody in the engine or at hand needs."""
        missing: dict[str, Version] = {}
        for waiter in sorted(at_hand, key=lambda w: w.arrived):
            if waiter.version.adapter and waiter.version not in self._adapters:
                missing.setdefault(waiter.version.name, waiter.version)
        for version in missing.values():
            waiters = [*self._running.values(), *at_hand]
            if not self._adapters.make_room(needed={w.version.name for w in waiters}):
                return
            try:
                outcome = self._adapters.begin(version)
            except LoadFailed as error:
                self._adapter_failed(version, error)
                continue
            if outcome is not None:
                self._adapter_added(outcome)

    def _adapter_added(self, outcome: LoadOutcome) -> None:
        self._metrics.adapter_added(outcome)
        self._turnover.note(outcome)
        self._waiting.answer_loads(outcome)

    def _adapter_failed(self, version: Version, error: LoadFailed) -> None:
        self._turnover.note_failure(version, error)
        self._waiting.fail(version, error)

    def _step(self) -> None:
        began = time.perf_counter()
        step = self._engine.step()
        self._metrics.stepped(seconds=time.perf_counter() - began)
        for id_, deltas in groupby(step.deltas, key=lambda delta: delta.id):
            job = self._running[id_].job
            assert job is not None
            if job.listener is not None:
                job.listener(list(deltas))
        for result in step.results:
            proven = self._adapters.finish(result)
            if proven is None:
                self._answer(self._running.pop(result.id), result)
            elif isinstance(proven[1], LoadFailed):
                self._adapter_failed(proven[0], proven[1])
            else:
                self._adapter_added(proven[1])

    def _answer(self, waiter: Waiter, result: EngineResult) -> None:
        if result.failure is not None:
            waiter.sampled.set_exception(result.failure)
            return
        seconds = self._clock() - waiter.admitted
        waiter.sampled.set_result(Sampled(result=result, version=waiter.version, seconds=seconds))

    # --- Changing over ---------------------------------------------------------------------

    def _change_over(self) -> None:
        """Loads the weights of the oldest waiter for others. The engine has drained."""
        foreign = [w for w in self._waiting if w.weights != self._turnover.version]
        if not foreign:
            # An adapter found no room beside those that this turn's waiters named, and none of
            # these went into the engine (loads, refusals): the next turn has room.
            return
        # Whoever the loaded weights serve was admitted before, or arrived after one of these.
        target = min(foreign, key=lambda w: w.arrived).weights
        try:
            outcome = self._turnover.change_to(target)
        except WeightsLost as error:
            self._refuse_all(error)
            self._on_fatal(error)
        except LoadFailed as error:
            self._waiting.fail(target, error, by_weights=True)
        else:
            self._waiting.answer_loads(outcome)

    def _refuse_all(self, error: TandemError) -> None:
        for waiter in [*self._inbox.close(error), *self._waiting.clear()]:
            waiter.fail(error)
        for waiter in self._running.values():
            waiter.sampled.set_exception(error)
        self._running = {}
