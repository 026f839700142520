"""Any requests in any order: a sampler computes nothing while it is asleep or without its weights.

It uses only the requested version, or in flight a newer one of the run, which each token names.
Every call ends. The fake engine refuses calls that a real one could not carry out in its state."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sampler_service.engine import EngineState, SleepLevel, StepOutput, WeightsTouched
from sampler_service.lifecycle import SwitchReport
from sampler_service.service.responses import versions_of
from sampler_service.weights.loader import LoadableVersion, Verified
from sampler_service.work import QueuedSwitch, Sampled, SubmissionQueue, Work
from tandem.errors import LoadFailed, TandemError
from tests.support.fake_engine import BASE, NEW, OTHER, Bench, FakeEngine, LaterReads
from tests.support.published_adapters import RANK, adapter, write_base

NUMBERS = range(1, 4)


class WouldBlock(Exception):
    """The engine's thread would wait for a request."""


class NonBlockingQueue(SubmissionQueue):
    def take_submissions(
        self, *, wait: bool, seconds: float | None = None
    ) -> list[Work | QueuedSwitch]:
        if wait and not len(self):
            raise WouldBlock
        return super().take_submissions(wait=False)


class WatchedEngine(FakeEngine):
    def step(self) -> StepOutput:
        assert not self.cache_asleep and not self.weights_asleep
        assert self.left, "a step without a request"
        for id_ in self.left:
            assert self.requests[id_].adapter is None or self.weights == BASE.path.name
        return super().step()


@dataclass(frozen=True)
class Asked:
    version: LoadableVersion
    in_flight: bool
    future: Future[Sampled]


def label(version: LoadableVersion) -> str:
    return version.name if version.adapter else version.path.name


class Sampler(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.reads = LaterReads(at_once=True)
        self.bench = Bench(
            base=write_base(self.folder / "base"),
            rank=RANK,
            engine=WatchedEngine(room=2),
            start_reading=self.reads,
        )
        scheduler, queue = self.bench.scheduler, NonBlockingQueue()
        scheduler._submissions = queue
        reader = scheduler._reader
        reader._on_done = queue.notify
        take = reader.take_version

        def take_at_once(version: LoadableVersion) -> Verified:
            reader.want(version)
            self.reads.finish()
            return take(version)

        reader.take_version = take_at_once
        adapters = [replace(adapter(self.folder, n), run_id="adapters") for n in NUMBERS]
        full = [replace(version, run_id="all weights") for version in (NEW, OTHER)]
        self.versions = [BASE, *full, *adapters]
        self.futures: list[Future[object]] = []
        self.sleeps: list[Future[SwitchReport]] = []
        self.samples: dict[str, Asked] = {}

    def teardown(self) -> None:
        self.bench.loader.errors.clear()
        self.futures.append(self.bench.scheduler.wake())
        self.run_until_blocked()
        assert all(future.done() for future in self.futures)
        shutil.rmtree(self.folder)

    def run_until_blocked(self, turns: int = 10_000) -> None:
        bench = self.bench
        for _ in range(turns):
            if bench.scheduler.status.state is EngineState.FAILED:
                return
            was, loads = bench.scheduler.status.state, len(bench.loader.loads)
            dropped, refusals = not bench.engine.weights, self.errors_left
            admitted = len(bench.engine.admitted)
            sleep_due = was is EngineState.AWAKE and any(not sleep.done() for sleep in self.sleeps)
            try:
                bench.scheduler.turn()
            except WouldBlock:
                if not self.reads.begun:
                    return
                self.reads.finish()
            assert not sleep_due or len(bench.engine.admitted) == admitted
            if (was, bench.scheduler.status.state) == (EngineState.ASLEEP, EngineState.AWAKE):
                loads, refusals = len(bench.loader.loads) - loads, refusals - self.errors_left
                assert loads <= 1 + refusals
                assert loads or not dropped
        if turns == 10_000:
            raise AssertionError("it never comes to rest")

    @property
    def errors_left(self) -> int:
        return sum(len(errors) for errors in self.bench.loader.errors.values())

    @rule(version=st.integers(0, 5), steps=st.integers(1, 9), in_flight=st.booleans())
    def sample(self, version: int, steps: int, in_flight: bool) -> None:
        wanted, id_ = self.versions[version], f"{len(self.futures)}"
        future = self.bench.ask(wanted, id_, steps=steps, in_flight=in_flight)
        self.samples[id_] = Asked(wanted, in_flight, future)
        self.futures.append(future)

    @rule(version=st.integers(0, 5), in_flight=st.booleans())
    def load(self, version: int, in_flight: bool) -> None:
        wanted = self.versions[version]
        self.futures.append(self.bench.scheduler.load(wanted, in_flight=in_flight))

    @rule(version=st.sampled_from([1, 3, 4]), turns=st.integers(0, 5))
    def update_in_flight(self, version: int, turns: int) -> None:
        self.sample(version, steps=9, in_flight=True)
        self.run_until_blocked(turns)
        self.load(version + 1, in_flight=True)

    @rule(level=st.sampled_from(SleepLevel))
    def sleep(self, level: SleepLevel) -> None:
        self.sleeps.append(self.bench.scheduler.sleep(level))
        self.futures.append(self.sleeps[-1])

    @rule(version=st.none() | st.integers(0, 5))
    def wake(self, version: int | None) -> None:
        wanted = None if version is None else self.versions[version]
        self.futures.append(self.bench.scheduler.wake(wanted))

    @rule(version=st.sampled_from([BASE, NEW, OTHER]), touched=st.booleans())
    def spoil(self, version, touched: bool) -> None:
        error = WeightsTouched("touched") if touched else LoadFailed("damaged")
        self.bench.loader.errors.setdefault(version.name, []).append(error)

    @rule(at_once=st.booleans())
    def reads_end(self, at_once: bool) -> None:
        self.reads.finish()
        self.reads.at_once = at_once

    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        if self.futures:
            self.futures[which % len(self.futures)].cancel()

    @rule(count=st.integers(1, 6))
    def turns(self, count: int) -> None:
        self.run_until_blocked(count)

    @rule(seconds=st.floats(0.1, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.bench.now += seconds

    @rule()
    def come_to_rest(self) -> None:
        self.run_until_blocked()

    @invariant()
    def only_what_was_cancelled_is_aborted(self) -> None:
        assert all(self.samples[id_].future.cancelled() for id_ in self.bench.engine.aborted)

    @invariant()
    def an_answer_is_of_the_version_asked_for(self) -> None:
        for id_, asked in self.samples.items():
            future, wanted = asked.future, asked.version
            if not future.done() or future.cancelled() or future.exception() is not None:
                continue
            sampled = future.result()
            ((*runs,),) = versions_of(sampled)
            told = [run.version for run in runs for _ in range(run.tokens)]
            labels = {version.name: label(version) for version in sampled.versions}
            assert [labels[name] for name in told] == self.bench.engine.drawn[id_]
            assert {each.run_id for each in sampled.versions} == {wanted.run_id}
            numbers = [each.name for each in sampled.versions]
            assert numbers == sorted(numbers) and numbers[0] >= wanted.name
            assert asked.in_flight or sampled.versions == (wanted,)

    @invariant()
    def what_it_says_is_what_the_engine_is(self) -> None:
        state, engine = self.bench.scheduler.status.state, self.bench.engine
        if state is EngineState.ASLEEP:
            assert engine.cache_asleep and engine.weights_asleep
        if state is EngineState.AWAKE:
            assert not engine.cache_asleep and engine.cache_empty
            assert engine.weights == self.bench.scheduler.status.version.path.name

    @invariant()
    def errors_are_those_of_the_product(self) -> None:
        for future in self.futures:
            if future.done() and not future.cancelled() and future.exception() is not None:
                assert isinstance(future.exception(), TandemError)


Sampler.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_a_sampler = Sampler.TestCase


def test_an_adapter_to_which_the_last_work_moved_is_read_without_new_work():
    sampler = Sampler()
    sampler.load(in_flight=False, version=1)
    sampler.load(in_flight=False, version=5)
    sampler.time_passes(seconds=2.0)
    sampler.update_in_flight(turns=0, version=4)
    sampler.teardown()
