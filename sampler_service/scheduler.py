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

from sampler_service.adapters import Adapters
from sampler_service.engine import Engine, WeightsTouched
from sampler_service.metrics import SamplerMetrics
from sampler_service.reload import Loader, LoadOutcome, Version
from sampler_service.states import State, StateMachine
from sampler_service.work import Sampled, SampleJob, Status, Waiter
from tandem.errors import LoadFailed, TandemError, WorkerDied
from tandem.telemetry import get_log

_GATHER_QUIET = 0.001
_GATHER_MOST = 0.050


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
        self._loader = loader
        self._adapters = adapters
        self._base = version
        self._version = version
        self._patience = patience
        self._metrics = metrics
        self._clock = clock
        self._on_fatal = on_fatal
        self._log = get_log()
        self._machine = StateMachine(on_change=metrics.state)
        self._condition = threading.Condition()
        self._inbox: list[Waiter] = []
        self._cancelled: list[str] = []
        self._waiting: list[Waiter] = []
        self._running: dict[str, Waiter] = {}
        self._stopped = False
        self._refusal: TandemError | None = None
        self._names_of_adapters: tuple[str, ...] = ()
        metrics.state(self._machine.state)
        metrics.version(version)

    # --- Called from any thread ------------------------------------------------------------

    def submit(self, job: SampleJob) -> Future[Sampled]:
        waiter = self._waiter(job.version, job)
        self._hand_over(waiter)
        return waiter.sampled

    def load(self, version: Version) -> Future[LoadOutcome]:
        """Ends when the version serves. A version that is loaded already ends at once."""
        waiter = self._waiter(version, None)
        self._hand_over(waiter)
        return waiter.loaded

    def cancel(self, request_id: str) -> None:
        """Forgets a request, wherever it is. Nobody waits for its answer any more."""
        with self._condition:
            self._cancelled.append(request_id)
            self._condition.notify()

    def stop(self) -> None:
        with self._condition:
            self._stopped = True
            self._condition.notify()

    @property
    def status(self) -> Status:
        return Status(
            state=self._machine.state,
            version=self._version,
            running=len(self._running),
            waiting=len(self._waiting) + len(self._inbox),
            adapters=self._names_of_adapters,
        )

    def _waiter(self, version: Version, job: SampleJob | None) -> Waiter:
        weights = self._base if version.adapter else version
        return Waiter(version=version, weights=weights, arrived=self._clock(), job=job)

    def _hand_over(self, waiter: Waiter) -> None:
        with self._condition:
            if self._refusal is None and not self._stopped:
                self._inbox.append(waiter)
                self._condition.notify()
                return
            refusal = self._refusal or WorkerDied("the sampler is stopping")
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
            if self._machine.state is not State.FAILED:
                self._machine.move(State.FAILED)
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
        """Moves the inbox into the waiting list; with nothing to do, waits for something."""
        if not self._running and not self._waiting and not self._adapters.proving:
            with self._condition:
                self._condition.wait_for(lambda: self._inbox or self._cancelled or self._stopped)
            self._gather()
        with self._condition:
            if self._stopped:
                return False
            arrived, self._inbox = self._inbox, []
            cancelled, self._cancelled = self._cancelled, []
        self._waiting.extend(arrived)
        if cancelled:
            self._forget(frozenset(cancelled))
        return True

    def _gather(self) -> None:
        """Lets a burst of requests arrive before the first step of an idle engine: a step costs
        nearly the same for one request and for fifty. Sleeps, so as not to be woken by each."""
        until = time.monotonic() + _GATHER_MOST
        seen = 0
        while seen != len(self._inbox) and time.monotonic() < until:
            seen = len(self._inbox)
            time.sleep(_GATHER_QUIET)

    def _forget(self, ids: frozenset[str]) -> None:
        self._waiting = [w for w in self._waiting if w.job is None or w.job.request.id not in ids]
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
        at_hand = [w for w in self._waiting if w.weights == self._version and w.arrived <= limit]
        self._add_adapters(at_hand)
        still = set(self._waiting)
        now = [w for w in at_hand if w in still and self._serves(w.version)]
        if not now:
            return
        admitted = set(now)
        self._waiting = [w for w in self._waiting if w not in admitted]
        for waiter in now:
            if waiter.job is None:
                self._answer_load(waiter, LoadOutcome(waiter.version, 0, 0.0, float("nan")))
        for waiter in sorted((w for w in now if w.job is not None), key=lambda w: w.order):
            self._start(waiter)

    def _held_up(self, waiter: Waiter) -> bool:
        """Whether it needs other weights, or room for its adapter that others take up."""
        if waiter.weights != self._version:
            return True
        new = waiter.version.adapter and waiter.version not in self._adapters
        return new and self._adapters.full

    def _serves(self, version: Version) -> bool:
        return self._adapters.ready(version) if version.adapter else version == self._version

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
        self._log_load(outcome)
        for waiter in [w for w in self._waiting if w.job is None and w.version == outcome.version]:
            self._waiting.remove(waiter)
            self._answer_load(waiter, outcome)

    def _adapter_failed(self, version: Version, error: LoadFailed) -> None:
        self._metrics.load_failed()
        self._log.error("load_failed", version=version.name, error=error.message)
        self._fail_waiters(version, error)

    def _step(self) -> None:
        began = time.perf_counter()
        results = self._engine.step()
        self._metrics.stepped(seconds=time.perf_counter() - began)
        for result in results:
            proven = self._adapters.finish(result)
            if proven is None:
                waiter = self._running.pop(result.id)
                seconds = self._clock() - waiter.admitted
                waiter.sampled.set_result(
                    Sampled(result=result, version=waiter.version, seconds=seconds)
                )
            elif isinstance(proven[1], LoadFailed):
                self._adapter_failed(proven[0], proven[1])
            else:
                self._adapter_added(proven[1])

    # --- Changing over ---------------------------------------------------------------------

    def _change_over(self) -> None:
        """Loads the weights of the oldest waiter for others. The engine has drained."""
        foreign = [w for w in self._waiting if w.weights != self._version]
        # Whoever the loaded weights serve was admitted before, or arrived after one of these.
        target = min(foreign, key=lambda w: w.arrived).weights
        self._machine.move(State.LOADING)
        try:
            outcome = self._loader.load(target)
        except LoadFailed as error:
            self._metrics.load_failed()
            self._log.error("load_failed", version=target.name, error=error.message)
            self._restore(error)
            self._fail_waiters(target, LoadFailed(error.message), by_weights=True)
            return
        self._adapters.clear()
        self._version = target
        self._machine.move(State.AWAKE)
        self._metrics.loaded(outcome)
        self._log_load(outcome)
        for waiter in [w for w in self._waiting if w.job is None and w.version == target]:
            self._waiting.remove(waiter)
            self._answer_load(waiter, outcome)

    def _log_load(self, outcome: LoadOutcome) -> None:
        self._log.info(
            "loaded",
            version=outcome.version.name,
            seconds=round(outcome.seconds, 4),
            bytes=outcome.bytes,
            canary_difference=outcome.canary_difference,
        )

    def _restore(self, cause: LoadFailed) -> None:
        """Makes sure that the old version serves again, or that nothing does."""
        if not isinstance(cause, WeightsTouched):
            self._machine.move(State.AWAKE)
            return
        self._adapters.clear()
        try:
            self._loader.load(self._version)
        except LoadFailed as error:
            refusal = LoadFailed(
                f"{cause.message}; {self._version.name}, which served before, could not be "
                f"loaded again: {error.message}"
            )
            self._machine.move(State.FAILED)
            self._log.error("restore_failed", version=self._version.name, error=error.message)
            self._refuse_all(refusal)
            self._on_fatal(refusal)
            return
        self._machine.move(State.AWAKE)
        self._log.info("restored", version=self._version.name)

    def _fail_waiters(
        self, version: Version, error: TandemError, *, by_weights: bool = False
    ) -> None:
        """Fails those who named a version, or, `by_weights`, those who need it loaded."""
        failed = {w for w in self._waiting if (w.weights if by_weights else w.version) == version}
        self._waiting = [w for w in self._waiting if w not in failed]
        for waiter in failed:
            waiter.fail(error)

    def _answer_load(self, waiter: Waiter, outcome: LoadOutcome) -> None:
        if waiter.loaded.set_running_or_notify_cancel():
            waiter.loaded.set_result(outcome)

    def _refuse_all(self, error: TandemError) -> None:
        with self._condition:
            self._refusal = error
            inbox, self._inbox = self._inbox, []
        for waiter in [*inbox, *self._waiting]:
            waiter.fail(error)
        for waiter in self._running.values():
            waiter.sampled.set_exception(error)
        self._waiting, self._running = [], {}
