"""Running work keeps, ends for, or delays newer weights of its run, as its client chose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sampler_service.service.responses import versions_of
from sampler_service.weights.loader import LoadableVersion
from sampler_service.work import Sampled, Updates
from tests.support.fake_engine import BASE, Bench
from tests.support.published_adapters import RANK, adapter, write_base

ONE, TWO, THREE = (
    LoadableVersion(name=f"run/v{step}", path=Path(f"v{step}"), run_id="run", step=step)
    for step in (1, 2, 3)
)
ELSEWHERE = replace(TWO, name="elsewhere/v9", run_id="elsewhere")
CHOSEN = [Updates.KEEP, Updates.ABORT]


def runs(sampled: Sampled) -> list[tuple[str, int]]:
    ((*each,),) = versions_of(sampled)
    return [(run.version, run.tokens) for run in each]


def serving(version: LoadableVersion, **arguments: object) -> Bench:
    bench = Bench(**arguments)  # type: ignore[arg-type]
    bench.scheduler.load(version)
    bench.settle()
    return bench


def test_a_load_waits_for_work_that_chose_nothing():
    bench = serving(ONE)
    running = bench.ask(ONE, "running", steps=6)
    bench.turns(2)
    load = bench.scheduler.load(TWO)
    bench.turns(2)
    assert not load.done()
    bench.settle()
    assert runs(running.result(0)) == [("run/v1", 6)]
    assert load.result(0).version == TWO


def test_kept_work_continues_with_a_version_that_no_in_flight_work_names():
    bench = serving(ONE)
    running = bench.ask(ONE, "running", steps=6, updates=Updates.KEEP)
    bench.turns(2)
    load = bench.scheduler.load(TWO)
    bench.turns(1)
    assert load.result(0).version == TWO and not running.done()
    bench.settle()
    assert runs(running.result(0)) == [("run/v1", 2), ("run/v2", 4)]


def test_aborted_work_ends_at_once_with_its_tokens_and_its_version():
    bench = serving(ONE)
    running = bench.ask(ONE, "running", steps=6, updates=Updates.ABORT)
    bench.turns(2)
    load = bench.scheduler.load(TWO)
    bench.turns(1)
    assert load.result(0).version == TWO
    answer = running.result(0)
    assert runs(answer) == [("run/v1", 2)] and answer.version == ONE
    (sample,) = answer.result.samples
    assert len(sample.tokens) == len(sample.logprobs) == 2 and not sample.stopped
    assert bench.scheduler.status.running == 0


def test_aborted_work_without_a_token_continues_with_the_new_version():
    engine_with_room_for_one = serving(ONE)
    engine_with_room_for_one.engine.room = 1
    first = engine_with_room_for_one.ask(ONE, "first", steps=6, updates=Updates.ABORT)
    second = engine_with_room_for_one.ask(ONE, "second", steps=3, updates=Updates.ABORT)
    engine_with_room_for_one.turns(2)
    engine_with_room_for_one.scheduler.load(TWO)
    engine_with_room_for_one.settle()
    assert runs(first.result(0)) == [("run/v1", 2)]
    assert [run for run in runs(second.result(0)) if run[1]] == [("run/v2", 3)]


@pytest.mark.parametrize("updates", CHOSEN)
def test_work_that_waits_or_comes_later_gets_the_new_version(updates):
    bench = serving(ONE)
    blocks = bench.ask(ONE, "blocks", steps=3)
    bench.turns(1)
    load = bench.scheduler.load(TWO)
    bench.turns(1)
    bench.now += 10.0  # nothing is admitted before the load any more
    waiting = bench.ask(ONE, "waiting", steps=2, updates=updates)
    bench.settle()
    late = bench.ask(ONE, "late", steps=2, updates=updates)
    bench.settle()
    assert load.done() and runs(blocks.result(0)) == [("run/v1", 3)]
    assert runs(waiting.result(0)) == runs(late.result(0)) == [("run/v2", 2)]
    assert bench.loader.loads == ["run/v1", "run/v2"]


@pytest.mark.parametrize("updates", CHOSEN)
@pytest.mark.parametrize("other", [BASE, ELSEWHERE], ids=["base", "another run"])
def test_weights_of_others_wait_for_it(updates, other):
    bench = serving(ONE)
    running = bench.ask(ONE, "running", steps=6, updates=updates)
    bench.turns(2)
    load = bench.scheduler.load(other)
    bench.settle()
    assert runs(running.result(0)) == [("run/v1", 6)]
    assert load.result(0).version == other


@pytest.mark.parametrize("updates", CHOSEN)
def test_an_older_version_of_its_run_waits_for_it(updates):
    bench = serving(TWO)
    running = bench.ask(TWO, "running", steps=6, updates=updates)
    bench.turns(2)
    bench.ask(ONE, "snapshot")
    bench.settle()
    assert runs(running.result(0)) == [("run/v2", 6)]


def test_each_ends_or_continues_as_its_own_client_chose():
    bench = serving(ONE)
    kept = bench.ask(ONE, "kept", steps=9, updates=Updates.KEEP)
    aborted = bench.ask(ONE, "aborted", steps=9, updates=Updates.ABORT)
    fixed = bench.ask(ONE, "fixed", steps=4)
    bench.turns(2)
    bench.scheduler.load(TWO)
    bench.settle()
    assert runs(fixed.result(0)) == [("run/v1", 4)]
    assert runs(aborted.result(0)) == [("run/v1", 4)], "it goes on while another one drains"
    assert runs(kept.result(0)) == [("run/v1", 4), ("run/v2", 5)]


@pytest.mark.parametrize("updates", CHOSEN)
def test_a_new_adapter_ends_or_carries_over_work_beside_fixed_work(tmp_path, updates):
    old, new = (replace(adapter(tmp_path, number), run_id="run") for number in (1, 2))
    bench = Bench(base=write_base(tmp_path / "base"), rank=RANK, room=2)
    running = bench.ask(old, "running", steps=9, updates=updates)
    fixed, base = bench.ask(old, "fixed", steps=9), bench.ask(BASE, "base", steps=9)
    bench.turns(3)
    load = bench.scheduler.load(new)
    bench.turns(2)
    assert load.result(0).version == new and not fixed.done()
    bench.settle()
    assert base.result(0) and runs(fixed.result(0)) == [(old.name, 9)]
    first, *then = runs(running.result(0))
    assert first[0] == old.name and 0 < first[1] < 9
    assert then == ([(new.name, 9 - first[1])] if updates is Updates.KEEP else [])
