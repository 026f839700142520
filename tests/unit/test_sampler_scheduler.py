"""The scheduler's rules, with an engine that is a fake and a clock that is moved by hand."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from sampler_service.engine import (
    EngineFacts,
    EngineRequest,
    EngineResult,
    SampledTokens,
    WeightsTouched,
)
from sampler_service.metrics import SamplerMetrics
from sampler_service.reload import LoadOutcome, Version
from sampler_service.scheduler import Sampled, SampleJob, Scheduler
from sampler_service.states import State, StateMachine
from tandem.errors import IllegalTransition, LoadFailed, SequenceTooLong, WorkerDied

BASE, NEW, OTHER = (Version(name=name, path=Path(name)) for name in ("base/m", "run/v1", "run/v2"))


@dataclass
class FakeEngine:
    """Ends each request after as many steps as its max_tokens says, and notes what it was told."""

    admitted: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    broken: bool = False
    facts: EngineFacts = field(
        default=EngineFacts(
            vocabulary=9, max_length=9, dtype="float32", device="cpu", name="fake", end_tokens=()
        )
    )

    @property
    def running(self) -> int:
        return len(self.left)

    def add(self, request: EngineRequest) -> None:
        if request.max_tokens > 100:
            raise SequenceTooLong("too long for the engine")
        self.admitted.append(request.id)
        self.left[request.id] = request.max_tokens

    def step(self) -> list[EngineResult]:
        if self.broken:
            raise RuntimeError("out of order")
        self.left = {id_: left - 1 for id_, left in self.left.items()}
        done = [id_ for id_, left in self.left.items() if left == 0]
        for id_ in done:
            del self.left[id_]
        sample = SampledTokens(np.zeros(1, np.int32), np.zeros(1, np.float32), stopped=False)
        return [EngineResult(id=id_, samples=(sample,)) for id_ in done]

    def abort(self, ids: list[str]) -> None:
        for id_ in ids:
            del self.left[id_]
        self.aborted.extend(ids)


@dataclass
class FakeLoader:
    """Loads unless told not to. `errors` are raised, one by one, by the loads of a version."""

    engine: FakeEngine
    loads: list[str] = field(default_factory=list)
    errors: dict[str, list[LoadFailed]] = field(default_factory=dict)

    def load(self, version: Version) -> LoadOutcome:
        assert not self.engine.left, "weights were changed under running requests"
        self.loads.append(version.name)
        if self.errors.get(version.name):
            raise self.errors[version.name].pop(0)
        return LoadOutcome(version=version, bytes=7, seconds=0.1, canary_difference=0.0)


class Bench:
    """A scheduler whose turns are taken one by one, in the test's own thread."""

    def __init__(self, *, patience: float = 2.0) -> None:
        self.engine = FakeEngine()
        self.loader = FakeLoader(self.engine)
        self.now = 0.0
        self.fatal: list[Exception] = []
        self.numbers = itertools.count()
        self.scheduler = Scheduler(
            self.engine,
            self.loader,
            version=BASE,
            patience=patience,
            metrics=SamplerMetrics(CollectorRegistry()),
            clock=lambda: self.now,
            on_fatal=self.fatal.append,
        )

    def ask(
        self,
        version: Version,
        id_: str,
        *,
        steps: int = 1,
        session: str = "s",
        seq_id: int | None = None,
    ) -> Future[Sampled]:
        request = EngineRequest(id=id_, prompt=[1], num_samples=1, max_tokens=steps)
        seq_id = next(self.numbers) if seq_id is None else seq_id
        self.now += 0.001  # nothing arrives at the same instant
        return self.scheduler.submit(
            SampleJob(request=request, version=version, session_id=session, seq_id=seq_id)
        )

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.turn()

    def settle(self) -> None:
        status = self.scheduler.status
        while status.running or status.waiting:
            self.scheduler.turn()
            status = self.scheduler.status


def test_a_request_for_the_loaded_version_runs_without_a_load():
    bench = Bench()
    answer = bench.ask(BASE, "a", steps=3)
    bench.turns(3)
    assert answer.result(timeout=0).version == BASE
    assert bench.loader.loads == []


def test_requests_that_wait_together_are_admitted_by_session_and_seq_id():
    bench = Bench()
    for session, seq_id in [("s2", 0), ("s1", 2), ("s1", 0), ("s1", 1)]:
        bench.ask(BASE, f"{session}/{seq_id}", session=session, seq_id=seq_id)
    bench.turns(1)
    assert bench.engine.admitted == ["s1/0", "s1/1", "s1/2", "s2/0"]


def test_another_version_is_loaded_when_the_engine_has_drained():
    bench = Bench()
    old, new = bench.ask(BASE, "old", steps=3), bench.ask(NEW, "new")
    bench.turns(2)
    assert bench.loader.loads == [] and not new.done()
    bench.settle()
    assert bench.loader.loads == ["run/v1"]
    assert (old.result(0).version, new.result(0).version) == (BASE, NEW)


def test_until_patience_is_over_the_loaded_version_goes_first():
    bench = Bench(patience=2.0)
    bench.ask(BASE, "first", steps=5)
    bench.ask(NEW, "new")
    bench.turns(1)
    bench.now += 1.0
    bench.ask(BASE, "second", steps=5)
    bench.turns(1)
    assert bench.engine.admitted == ["first", "second"]


def test_after_patience_nothing_of_the_loaded_version_goes_before_the_waiter():
    bench = Bench(patience=2.0)
    bench.ask(BASE, "first", steps=4)
    new = bench.ask(NEW, "new")
    bench.turns(1)
    bench.now += 2.5
    late = bench.ask(BASE, "late")
    bench.turns(1)
    assert bench.engine.admitted == ["first"]
    bench.settle()
    assert bench.engine.admitted == ["first", "new", "late"]
    assert bench.loader.loads == ["run/v1", "base/m"]
    assert (new.result(0).version, late.result(0).version) == (NEW, BASE)


def test_the_engine_changes_to_the_version_of_the_oldest_waiter():
    bench = Bench()
    bench.ask(BASE, "old")
    bench.ask(OTHER, "other")
    bench.ask(NEW, "new")
    bench.ask(OTHER, "other too")
    bench.settle()
    assert bench.loader.loads == ["run/v2", "run/v1"]
    assert bench.engine.admitted == ["old", "other", "other too", "new"]


def test_an_explicit_load_waits_like_a_request_and_ends_when_the_version_serves():
    bench = Bench()
    bench.ask(BASE, "old", steps=2)
    load = bench.scheduler.load(NEW)
    bench.turns(1)
    assert not load.done()
    bench.settle()
    assert load.result(0).bytes == 7
    assert bench.scheduler.status.version == NEW


def test_a_load_of_what_is_loaded_ends_at_once_though_requests_run():
    bench = Bench()
    bench.ask(BASE, "running", steps=5)
    load = bench.scheduler.load(BASE)
    bench.turns(1)
    assert load.result(0).version == BASE
    assert bench.loader.loads == []


def test_a_version_that_cannot_be_loaded_fails_its_own_requests_only():
    bench = Bench()
    bench.loader.errors = {"run/v1": [LoadFailed("damaged")]}
    new, other = bench.ask(NEW, "new"), bench.ask(OTHER, "other")
    load = bench.scheduler.load(NEW)
    bench.turns(1)
    old = bench.ask(BASE, "old")
    bench.settle()
    for failed in (new, load):
        with pytest.raises(LoadFailed, match="damaged"):
            failed.result(0)
    assert other.result(0).version == OTHER
    assert old.result(0).version == BASE


def test_nothing_is_loaded_again_when_the_old_weights_were_not_touched():
    bench = Bench()
    bench.loader.errors = {"run/v1": [LoadFailed("damaged")]}
    bench.ask(NEW, "new")
    bench.settle()
    assert bench.loader.loads == ["run/v1"]
    assert bench.scheduler.status.version == BASE


def test_touched_weights_are_replaced_by_the_old_version_before_anything_runs():
    bench = Bench()
    bench.loader.errors = {"run/v1": [WeightsTouched("canary")]}
    new, old = bench.ask(NEW, "new"), bench.ask(BASE, "old")
    bench.settle()
    assert bench.loader.loads == ["run/v1", "base/m"]
    with pytest.raises(LoadFailed, match="canary") as raised:
        new.result(0)
    assert raised.value.type == "load_failed"
    assert old.result(0).version == BASE


def test_without_old_or_new_weights_everything_is_refused():
    bench = Bench()
    bench.loader.errors = {
        "run/v1": [WeightsTouched("canary")],
        "base/m": [LoadFailed("gone")],
    }
    new, other = bench.ask(NEW, "new"), bench.ask(OTHER, "other")
    bench.turns(1)
    later = bench.ask(BASE, "later")
    for refused in (new, other, later):
        with pytest.raises(LoadFailed, match="gone"):
            refused.result(0)
    assert bench.scheduler.status.state is State.FAILED
    assert len(bench.fatal) == 1


def test_a_cancelled_request_is_aborted_in_the_engine():
    bench = Bench()
    bench.ask(BASE, "long", steps=50)
    bench.turns(1)
    bench.scheduler.cancel("long")
    bench.ask(BASE, "next")
    bench.turns(1)
    assert bench.engine.aborted == ["long"]
    assert bench.engine.running == 0


def test_a_cancelled_waiter_causes_no_load():
    bench = Bench()
    bench.ask(BASE, "running", steps=2)
    bench.ask(NEW, "new")
    bench.turns(1)
    bench.scheduler.cancel("new")
    bench.settle()
    assert bench.loader.loads == []


def test_a_request_that_the_engine_refuses_fails_alone():
    bench = Bench()
    bad, good = bench.ask(BASE, "bad", steps=101), bench.ask(BASE, "good")
    bench.settle()
    with pytest.raises(SequenceTooLong):
        bad.result(0)
    assert good.result(0).version == BASE


def test_an_engine_that_breaks_answers_everybody_and_ends_the_process():
    bench = Bench()
    running, waiting = bench.ask(BASE, "running"), bench.ask(NEW, "waiting")
    bench.engine.broken = True
    bench.scheduler.run()
    later = bench.ask(BASE, "later")
    for refused in (running, waiting, later):
        with pytest.raises(WorkerDied, match="out of order"):
            refused.result(0)
    assert len(bench.fatal) == 1


def test_stopping_answers_those_who_wait():
    bench = Bench()
    thread = bench.scheduler.start()
    done = bench.ask(BASE, "a")
    assert done.result(timeout=10).version == BASE
    bench.scheduler.stop()
    thread.join(timeout=10)
    with pytest.raises(WorkerDied):
        bench.ask(BASE, "b").result(0)


@pytest.mark.parametrize(
    ("start", "to"),
    [(State.ASLEEP, State.AWAKE), (State.FAILED, State.LOADING), (State.LOADING, State.ASLEEP)],
)
def test_an_illegal_move_raises_and_changes_nothing(start: State, to: State):
    machine = StateMachine(start)
    with pytest.raises(IllegalTransition):
        machine.move(to)
    assert machine.state is start
