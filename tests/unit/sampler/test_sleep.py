from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sampler_service.engine import EngineState, SleepLevel, WeightsTouched
from tandem.errors import LoadFailed, WorkerDied
from tests.support.fake_engine import BASE, NEW, OTHER, Bench
from tests.support.published_adapters import RANK, adapter, write_base

KEEP, DROP = SleepLevel
ASLEEP, AWAKE = EngineState.ASLEEP, EngineState.AWAKE


def asleep(level: SleepLevel, **arguments: object) -> Bench:
    bench = Bench(**arguments)
    done = bench.scheduler.sleep(level)
    bench.turns(1)
    assert done.done()
    return bench


def test_what_runs_ends_and_nothing_more_is_admitted_before_the_sleep():
    bench = Bench()
    running = bench.ask(BASE, "running", steps=3)
    bench.turns(1)
    sleep, late = bench.scheduler.sleep(KEEP), bench.ask(BASE, "late")
    bench.turns(2)
    assert running.done() and not sleep.done()
    bench.turns(1)
    assert sleep.done() and not late.done()
    assert bench.engine.admitted == ["running"]
    assert bench.scheduler.status.state is ASLEEP
    assert bench.scheduler.status.waiting == 1


@pytest.mark.parametrize("level", SleepLevel)
def test_what_waits_is_answered_after_the_wake(level: SleepLevel):
    bench = asleep(level)
    answers = [bench.ask(version, version.name) for version in (NEW, BASE)]
    load = bench.scheduler.load(NEW)
    wake = bench.scheduler.wake()
    bench.settle()
    assert wake.done()
    assert [answer.result(0).version for answer in answers] == [NEW, BASE]
    assert load.result(0).version == NEW


def test_a_wake_after_weights_were_kept_loads_nothing():
    bench = asleep(KEEP)
    bench.scheduler.wake()
    bench.turns(1)
    assert bench.loader.loads == []
    assert bench.scheduler.status.state is AWAKE


def test_a_wake_after_weights_were_dropped_loads_what_was_loaded():
    bench = asleep(DROP)
    bench.scheduler.wake()
    bench.turns(1)
    assert bench.loader.loads == ["base/m"]


@pytest.mark.parametrize("level", SleepLevel)
def test_a_wake_loads_the_version_that_is_wanted_once_and_answers_its_loads(level: SleepLevel):
    bench = asleep(level)
    load = bench.scheduler.load(NEW)
    bench.ask(OTHER, "of another version")
    bench.scheduler.wake(NEW)
    bench.turns(1)
    assert bench.loader.loads == ["run/v1"]
    assert load.result(0).bytes == 7
    assert bench.scheduler.status.version == NEW


@pytest.mark.parametrize("level", SleepLevel)
def test_a_wake_without_a_version_loads_that_of_the_oldest_waiter(level: SleepLevel):
    bench = asleep(level)
    bench.ask(OTHER, "other")
    bench.ask(NEW, "new")
    bench.scheduler.wake()
    bench.turns(1)
    assert bench.loader.loads == ["run/v2"]


def test_a_switch_to_what_it_is_already_is_answered_at_once():
    bench = Bench()
    bench.ask(BASE, "running", steps=5)
    wake = bench.scheduler.wake(NEW)
    bench.turns(1)
    assert wake.result(0).seconds == 0
    assert bench.loader.loads == []
    bench = asleep(KEEP)
    again = bench.scheduler.sleep(DROP)
    bench.turns(1)
    assert again.result(0).seconds == 0
    assert bench.engine.weights


def test_sleeps_and_wakes_are_carried_out_in_their_order():
    bench = Bench()
    switches = [
        bench.scheduler.sleep(KEEP),
        bench.scheduler.wake(),
        bench.scheduler.sleep(DROP),
        bench.scheduler.wake(NEW),
    ]
    for number, switch in enumerate(switches):
        assert not any(each.done() for each in switches[number:])
        bench.turns(1)
        assert switch.done()
    assert bench.scheduler.status.state is AWAKE
    assert bench.loader.loads == ["run/v1"]


def test_a_sleep_that_is_cancelled_while_requests_end_does_not_happen():
    bench = Bench()
    bench.ask(BASE, "running", steps=5)
    bench.turns(1)
    sleep, late = bench.scheduler.sleep(DROP), bench.ask(BASE, "late")
    bench.turns(1)
    assert sleep.cancel()
    bench.settle()
    assert late.result(0).version == BASE
    assert bench.scheduler.status.state is AWAKE


def test_a_wake_that_is_cancelled_before_its_turn_leaves_it_asleep():
    bench = asleep(KEEP)
    assert bench.scheduler.wake().cancel()
    bench.turns(1)
    assert bench.scheduler.status.state is ASLEEP


@pytest.mark.parametrize("error", [LoadFailed("damaged"), WeightsTouched("canary")])
@pytest.mark.parametrize("level", SleepLevel)
def test_a_version_that_does_not_load_at_a_wake_fails_its_own_work_and_the_one_before_serves(
    level: SleepLevel, error: LoadFailed
):
    bench = asleep(level)
    bench.loader.errors = {"run/v1": [error]}
    new, old = bench.ask(NEW, "new"), bench.ask(BASE, "old")
    wake = bench.scheduler.wake(NEW)
    bench.settle()
    with pytest.raises(LoadFailed, match=error.message):
        new.result(0)
    assert wake.done() and wake.exception() is None
    assert old.result(0).version == BASE
    unread = type(error) is LoadFailed
    assert bench.loader.reads[0] == "run/v1"
    assert bench.loader.loads == ["run/v1"] * (not unread) + ["base/m"] * (
        not (unread and level is KEEP)
    )


def test_dropped_weights_that_cannot_be_read_at_first_are_read_again():
    bench = asleep(DROP)
    bench.loader.errors = {"base/m": [LoadFailed("stale")]}
    answer, wake = bench.ask(BASE, "a"), bench.scheduler.wake()
    bench.settle()
    assert answer.result(0).version == BASE
    assert wake.exception() is None


def test_an_engine_that_can_load_nothing_after_its_weights_were_dropped_has_failed():
    bench = asleep(DROP)
    bench.loader.errors = {"run/v1": [LoadFailed("damaged")], "base/m": [LoadFailed("gone")]}
    refused = [bench.ask(NEW, "new"), bench.ask(BASE, "old"), bench.scheduler.wake(NEW)]
    bench.turns(1)
    refused.append(bench.ask(BASE, "later"))
    for each in refused:
        with pytest.raises(LoadFailed, match="gone"):
            each.result(0)
    assert bench.scheduler.status.state is EngineState.FAILED
    assert len(bench.fatal) == 1


def test_adapters_that_were_kept_serve_at_once_and_dropped_ones_are_added_again(tmp_path: Path):
    base = write_base(tmp_path / "base")
    version = adapter(tmp_path, 1)
    for level, canaries in [(KEEP, 1), (DROP, 2)]:
        bench = Bench(base=base, rank=RANK)
        bench.ask(version, "before")
        bench.settle()
        bench.scheduler.sleep(level)
        bench.scheduler.wake(version)
        bench.turns(2)
        assert bench.scheduler.status.adapters == ((version.name,) if level is KEEP else ())
        answer = bench.ask(version, "after")
        bench.settle()
        assert answer.result(0).version == version
        assert bench.engine.admitted.count(f"canary of {version.name}") == canaries


def test_an_adapter_that_is_being_checked_is_waited_for(tmp_path: Path):
    bench = Bench(base=write_base(tmp_path / "base"), rank=RANK)
    version = adapter(tmp_path, 1)
    bench.adapters.load_adapter(bench.adapters.verify(version, lambda: None))
    sleep = bench.scheduler.sleep(KEEP)
    bench.turns(1)
    assert not sleep.done() and bench.adapters.ready(version)
    bench.turns(1)
    assert sleep.done()


def test_an_engine_that_breaks_while_it_wakes_refuses_the_wake_too():
    bench = asleep(KEEP)
    bench.engine.weights_asleep = False  # the fake engine's own assertion fails
    wake, waiting = bench.scheduler.wake(), bench.ask(BASE, "waiting")
    bench.scheduler.run()
    for refused in (wake, waiting):
        with pytest.raises(WorkerDied):
            refused.result(0)


def test_an_engine_that_is_asleep_in_a_thread_of_its_own_wakes_when_told_to():
    bench = Bench()
    thread = threading.Thread(target=bench.scheduler.run, daemon=True)
    thread.start()
    for level in SleepLevel:
        assert bench.scheduler.sleep(level).result(timeout=60).bytes_moved == 100
        answer = bench.ask(BASE, level.name)
        assert bench.scheduler.wake().result(timeout=60).bytes_moved == 100
        assert answer.result(timeout=60).version == BASE
    bench.engine.broken = True
    with pytest.raises(WorkerDied):
        bench.ask(BASE, "last").result(timeout=60)
    thread.join(timeout=60)
    assert not thread.is_alive()
