"""Requests that continue with newer weights of their run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sampler_service.engine import SleepLevel, WeightsTouched
from sampler_service.service.responses import versions_of
from sampler_service.weights.loader import LoadableVersion
from sampler_service.work import Sampled
from tandem.errors import LoadFailed
from tandem.v1 import common_pb2
from tests.support.fake_engine import BASE, Bench, LaterReads
from tests.support.published_adapters import RANK, adapter, write_base

ONE, TWO, THREE = (
    LoadableVersion(name=f"run/v{step}", path=Path(f"v{step}"), run_id="run", step=step)
    for step in (1, 2, 3)
)


def runs(sampled: Sampled) -> list[tuple[str, int]]:
    """The versions of the only sample, each with its number of tokens."""
    ((*each,),) = versions_of(sampled)
    return [(run.version, run.tokens) for run in each]


def serving(version: LoadableVersion, **arguments: object) -> Bench:
    bench = Bench(**arguments)  # type: ignore[arg-type]
    bench.scheduler.load(version, in_flight=True)
    bench.settle()
    return bench


def test_what_runs_goes_on_with_a_newer_version_and_each_token_says_its_own():
    bench = serving(ONE)
    running = bench.ask(ONE, "running", steps=6, in_flight=True)
    bench.turns(2)
    load = bench.scheduler.load(TWO, in_flight=True)
    bench.turns(1)
    assert load.result(0).version == TWO
    assert not running.done(), "the load did not wait for it"
    bench.settle()
    assert runs(running.result(0)) == [("run/v1", 2), ("run/v2", 4)]
    assert running.result(0).version == TWO
    assert bench.engine.admitted == ["running"], "it never left the engine"


def test_without_in_flight_the_engine_drains_and_nothing_is_mixed():
    bench = serving(ONE)
    running = bench.ask(ONE, "running", steps=6)
    bench.turns(2)
    load = bench.scheduler.load(TWO, in_flight=True)
    bench.turns(3)
    assert not load.done()
    bench.settle()
    assert runs(running.result(0)) == [("run/v1", 6)]
    assert load.result(0).version == TWO


@pytest.mark.parametrize(
    "other",
    [BASE, replace(TWO, name="elsewhere/v9", run_id="elsewhere")],
    ids=["the base model", "a version of another run"],
)
def test_other_weights_wait_for_what_is_in_flight(other: LoadableVersion):
    bench = serving(ONE)
    running = bench.ask(ONE, "running", steps=6, in_flight=True)
    bench.turns(2)
    answer = bench.ask(other, "other", in_flight=True)
    bench.settle()
    assert runs(running.result(0)) == [("run/v1", 6)]
    assert answer.result(0).version == other


def test_a_newer_version_that_is_not_named_in_flight_carries_nothing_over():
    bench = serving(ONE)
    running = bench.ask(ONE, "running", steps=6, in_flight=True)
    bench.turns(2)
    bench.ask(TWO, "snapshot")
    bench.settle()
    late = bench.ask(ONE, "late", in_flight=True)
    bench.settle()
    assert runs(running.result(0)) == [("run/v1", 6)]
    assert late.result(0).version == ONE


def test_requests_beside_those_in_flight_end_with_their_own_version_first():
    bench = serving(ONE)
    snapshot = bench.ask(ONE, "snapshot", steps=4)
    running = bench.ask(ONE, "running", steps=9, in_flight=True)
    bench.turns(2)
    bench.scheduler.load(TWO, in_flight=True)
    bench.settle()
    assert runs(snapshot.result(0)) == [("run/v1", 4)]
    assert runs(running.result(0)) == [("run/v1", 4), ("run/v2", 5)]


def test_what_waits_or_arrives_later_is_served_by_the_newest_version_at_once():
    reads = LaterReads(at_once=True)
    bench = serving(ONE, start_reading=reads)
    running = bench.ask(ONE, "running", steps=3)  # delays the change of version
    bench.turns(1)
    load = bench.scheduler.load(TWO, in_flight=True)
    bench.turns(1)
    bench.now += 10.0  # nothing is admitted before the load any more
    waiting = bench.ask(ONE, "waiting", in_flight=True)
    bench.settle()
    late = bench.ask(ONE, "late", in_flight=True)
    bench.settle()
    assert load.result(0).version == TWO
    assert runs(running.result(0)) == [("run/v1", 3)]
    assert runs(waiting.result(0)) == runs(late.result(0)) == [("run/v2", 1)]
    assert bench.loader.loads == ["run/v1", "run/v2"]


def test_a_request_follows_through_several_versions_and_never_back():
    bench = serving(ONE)
    running = bench.ask(ONE, "running", steps=9, in_flight=True)
    bench.turns(1)
    bench.scheduler.load(TWO, in_flight=True)
    bench.turns(2)
    newest = bench.ask(THREE, "newest", in_flight=True)
    bench.turns(2)
    older = bench.scheduler.load(TWO, in_flight=True)
    bench.settle()
    assert runs(running.result(0)) == [("run/v1", 1), ("run/v2", 1), ("run/v3", 7)]
    assert newest.result(0).version == older.result(0).version == THREE
    assert bench.loader.loads == ["run/v1", "run/v2", "run/v3"]


@pytest.mark.parametrize(
    "error", [LoadFailed("unreadable"), WeightsTouched("another canary")], ids=["read", "load"]
)
def test_after_a_load_that_fails_what_runs_goes_on_with_the_version_before(error: LoadFailed):
    bench = serving(ONE)
    bench.loader.errors = {"run/v2": [error]}
    running = bench.ask(ONE, "running", steps=6, in_flight=True)
    bench.turns(2)
    load, for_it = bench.scheduler.load(TWO, in_flight=True), bench.ask(TWO, "x", in_flight=True)
    bench.settle()
    for future in (load, for_it):
        with pytest.raises(LoadFailed, match=error.message):
            future.result(0)
    assert runs(running.result(0)) == [("run/v1", 6)]
    late = bench.ask(ONE, "late", in_flight=True)
    bench.settle()
    assert late.result(0).version == ONE


def test_what_follows_a_version_that_was_handed_over_reads_its_files():
    """The trainer's copy is gone by then."""
    bench = serving(replace(TWO, handoff=common_pb2.Handoff(name=TWO.name)))
    bench.scheduler.load(THREE)
    bench.settle()
    late = bench.ask(ONE, "late", in_flight=True)
    bench.settle()
    assert late.result(0).version == TWO
    assert late.result(0).version.handoff is None


def test_when_no_version_can_be_loaded_what_runs_fails_without_another_token():
    bench = serving(ONE)
    bench.loader.errors = {each: [WeightsTouched("damaged")] for each in ("run/v1", "run/v2")}
    running = bench.ask(ONE, "running", steps=6, in_flight=True)
    bench.turns(2)
    bench.scheduler.load(TWO, in_flight=True)
    bench.turns(1)
    with pytest.raises(LoadFailed, match="could not be loaded again"):
        running.result(0)
    assert bench.fatal


def test_a_sleep_waits_for_what_is_in_flight_and_the_wake_brings_the_newer_version():
    bench = serving(ONE)
    running = bench.ask(ONE, "running", steps=6, in_flight=True)
    bench.turns(2)
    sleep = bench.scheduler.sleep(SleepLevel.KEEP_WEIGHTS)
    load = bench.scheduler.load(TWO, in_flight=True)
    bench.turns(5)
    assert runs(running.result(0)) == [("run/v1", 6)] and sleep.done() and not load.done()
    bench.scheduler.wake()
    bench.settle()
    late = bench.ask(ONE, "late", in_flight=True)
    bench.settle()
    assert load.result(0).version == late.result(0).version == TWO


def test_a_request_that_was_carried_over_can_be_cancelled():
    bench = serving(ONE)
    running = bench.ask(ONE, "running", steps=6, in_flight=True)
    bench.turns(2)
    bench.scheduler.load(TWO, in_flight=True)
    bench.turns(2)
    running.cancel()
    bench.turns(1)
    assert bench.engine.aborted == ["running"]


def test_requests_move_from_one_adapter_to_the_next_while_others_run_on(tmp_path: Path):
    one, two = (replace(adapter(tmp_path, number), run_id="run") for number in (1, 2))
    bench = Bench(base=write_base(tmp_path / "base"), rank=RANK, room=2)
    running = bench.ask(one, "running", steps=9, in_flight=True)
    fixed, base = bench.ask(one, "fixed", steps=9), bench.ask(BASE, "base", steps=9)
    bench.turns(3)
    load = bench.scheduler.load(two, in_flight=True)
    bench.turns(2)
    assert load.result(0).version == two
    bench.settle()
    first, then = runs(running.result(0))
    assert first[0] == one.name and then[0] == two.name and first[1] + then[1] == 9
    assert runs(fixed.result(0)) == [(one.name, 9)]
    assert base.result(0).version == BASE
    assert bench.loader.loads == []
