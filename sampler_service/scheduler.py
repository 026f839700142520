"""Which request runs when, and when the engine changes to another weight version.

One thread owns the engine: it admits requests, steps, answers, and changes the weights. Others
hand over work through `submit`, `load` and `cancel`, which return at once; answers come back
as a `concurrent.futures.Future`.

- A request for the loaded version is admitted before the next step. Requests that wait together
  are admitted in the order of (session, seq_id), whatever order they arrived in.
- A request or a load for another version waits until the engine has drained, or, once the oldest
  has waited longer than `patience`, holds back everything that would be admitted before it.
  Then the engine changes over to the version of the oldest waiter.
- A load that fails leaves the old version serving: untouched, or loaded again. Only those who
  asked for the new one get `LoadFailed`. If the old one cannot be had back, the state is
  `failed` and every request is refused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from sampler_service.engine import Engine, EngineRequest, EngineResult, WeightsTouched
from sampler_service.metrics import SamplerMetrics
from sampler_service.reload import Loader, LoadOutcome, Version
from sampler_service.states import State, StateMachine
from tandem.errors import LoadFailed, TandemError, WorkerDied
from tandem.telemetry import get_log

_GATHER_QUIET = 0.001
_GATHER_MOST = 0.050


@dataclass(frozen=True)
class SampleJob:
    """A request for a version, with its place among those that wait."""

    request: EngineRequest
    version: Version
    session_id: str
    seq_id: int


@dataclass(frozen=True)
class Sampled:
    """What a request was answered with: the version is the one that was in the engine."""

    result: EngineResult
    version: Version


@dataclass(frozen=True)
class Status:
    state: State
    version: Version
    running: int
    waiting: int


@dataclass(eq=False)
class _Waiter:
    """Work that waits or runs. `job` is None for an explicit load."""

    version: Version
    arrived: float
    job: SampleJob | None = None
    sampled: Future[Sampled] = field(default_factory=Future)
    loaded: Future[LoadOutcome] = field(default_factory=Future)

    def fail(self, error: TandemError) -> None:
        future: Future[Sampled] | Future[LoadOutcome] = (
            self.sampled if self.job is not None else self.loaded
        )
        if future.set_running_or_notify_cancel():
            future.set_exception(error)

    @property
    def order(self) -> tuple[str, int, float]:
        assert self.job is not None
        return (self.job.session_id, self.job.seq_id, self.arrived)


class Scheduler:
    """Runs an engine. `start` spawns its thread unless the caller runs `run` in one of its own.

    `on_fatal` is called once when the engine itself has failed; nothing is served from then on.
    """

    def __init__(
        self,
        engine: Engine,
        loader: Loader,
        *,
        version: Version,
        patience: float,
        metrics: SamplerMetrics,
        clock: Callable[[], float] = time.monotonic,
        on_fatal: Callable[[TandemError], None] = lambda _: None,
    ) -> None:
        self._engine = engine
        self._loader = loader
        self._version = version
        self._patience = patience
        self._metrics = metrics
        self._clock = clock
        self._on_fatal = on_fatal
        self._log = get_log()
        self._machine = StateMachine(on_change=metrics.state)
        self._condition = threading.Condition()
        self._inbox: list[_Waiter] = []
        self._cancelled: list[str] = []
        self._waiting: list[_Waiter] = []
        self._running: dict[str, _Waiter] = {}
        self._stopped = False
        self._refusal: TandemError | None = None
        metrics.state(self._machine.state)
        metrics.version(version)

    # --- Called from any thread ------------------------------------------------------------

    def submit(self, job: SampleJob) -> Future[Sampled]:
        waiter = _Waiter(version=job.version, arrived=self._clock(), job=job)
        self._hand_over(waiter)
        return waiter.sampled

    def load(self, version: Version) -> Future[LoadOutcome]:
        """Ends when the version serves. A version that is loaded already ends at once."""
        waiter = _Waiter(version=version, arrived=self._clock())
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
        )

    def _hand_over(self, waiter: _Waiter) -> None:
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
        if self._running:
            self._step()
        elif self._waiting:
            self._change_over()
        self._metrics.queue(running=len(self._running), waiting=len(self._waiting))
        return True

    def _take(self) -> bool:
        """Moves the inbox into the waiting list; with nothing to do, waits for something."""
        if not self._running and not self._waiting:
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
        """Admits what is for the loaded version, except behind a waiter out of patience."""
        for waiter in [w for w in self._waiting if w.job is None and w.version == self._version]:
            self._waiting.remove(waiter)
            self._answer_load(waiter, LoadOutcome(self._version, 0, 0.0, float("nan")))
        foreign = [w.arrived for w in self._waiting if w.version != self._version]
        limit = float("inf")
        if foreign and self._clock() - min(foreign) > self._patience:
            limit = min(foreign)
        now = [w for w in self._waiting if w.version == self._version and w.arrived <= limit]
        if not now:
            return
        admitted = set(map(id, now))
        self._waiting = [w for w in self._waiting if id(w) not in admitted]
        for waiter in sorted(now, key=lambda w: w.order):
            assert waiter.job is not None
            if not waiter.sampled.set_running_or_notify_cancel():
                continue
            try:
                self._engine.add(waiter.job.request)
            except TandemError as error:
                waiter.sampled.set_exception(error)
                continue
            self._running[waiter.job.request.id] = waiter

    def _step(self) -> None:
        began = time.perf_counter()
        results = self._engine.step()
        self._metrics.stepped(seconds=time.perf_counter() - began)
        for result in results:
            waiter = self._running.pop(result.id)
            waiter.sampled.set_result(Sampled(result=result, version=self._version))

    # --- Changing over ---------------------------------------------------------------------

    def _change_over(self) -> None:
        """Loads the version of the oldest waiter. The engine has drained."""
        target = min(self._waiting, key=lambda w: w.arrived).version
        # Nobody else gets in between: requests of the loaded version were admitted before.
        assert target != self._version
        self._machine.move(State.LOADING)
        try:
            outcome = self._loader.load(target)
        except LoadFailed as error:
            self._metrics.load_failed()
            self._log.error("load_failed", version=target.name, error=error.message)
            self._restore(error)
            self._fail_waiters(target, LoadFailed(error.message))
            return
        self._version = target
        self._machine.move(State.AWAKE)
        self._metrics.loaded(outcome)
        self._log.info(
            "loaded",
            version=target.name,
            seconds=round(outcome.seconds, 4),
            bytes=outcome.bytes,
            canary_difference=outcome.canary_difference,
        )
        for waiter in [w for w in self._waiting if w.job is None and w.version == target]:
            self._waiting.remove(waiter)
            self._answer_load(waiter, outcome)

    def _restore(self, cause: LoadFailed) -> None:
        """Makes sure that the old version serves again, or that nothing does."""
        if not isinstance(cause, WeightsTouched):
            self._machine.move(State.AWAKE)
            return
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

    def _fail_waiters(self, version: Version, error: TandemError) -> None:
        failed = [w for w in self._waiting if w.version == version]
        self._waiting = [w for w in self._waiting if w.version != version]
        for waiter in failed:
            waiter.fail(error)

    def _answer_load(self, waiter: _Waiter, outcome: LoadOutcome) -> None:
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
