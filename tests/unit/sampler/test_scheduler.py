from __future__ import annotations

import threading

import pytest
from structlog.testing import capture_logs

from sampler_service.engine import EngineState, WeightsTouched
from tandem.errors import (
    LoadFailed,
    OperationTimedOut,
    SequenceTooLong,
    WorkerDied,
)
from tests.support.fake_engine import BASE, NEW, OTHER, Bench


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


def test_a_sample_may_take_its_time_from_when_the_engine_begins_it():
    bench = Bench(timeout=100.0)
    bench.engine.room = 1
    answers = [bench.ask(BASE, name, steps=3) for name in "abcd"]
    for _ in range(3 * len(answers)):
        bench.turns(1)
        bench.now += 30.0
    assert bench.now > 3 * 100.0
    assert [answer.result(timeout=0).version for answer in answers] == [BASE] * 4


def test_a_sample_that_takes_too_long_fails_and_makes_room_for_the_next():
    bench = Bench(timeout=100.0)
    bench.engine.room = 1
    long, next_one = bench.ask(BASE, "long", steps=50), bench.ask(BASE, "next")
    bench.turns(1)
    bench.now += 100.5
    bench.turns(1)
    with pytest.raises(OperationTimedOut, match="within 100 s"):
        long.result(timeout=0)
    assert bench.engine.aborted == ["long"]
    assert next_one.result(timeout=0).version == BASE


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


def test_after_patience_nothing_of_the_loaded_version_is_admitted_before_the_waiter():
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


def test_a_cancelled_load_is_not_carried_out():
    bench = Bench()
    running = bench.ask(BASE, "running", steps=2)
    given_up, wanted = bench.scheduler.load(NEW), bench.scheduler.load(OTHER)
    bench.turns(1)
    assert given_up.cancel(), "as asyncio does when a call is over its deadline"
    bench.settle()
    assert running.result(0).version == BASE
    assert wanted.result(0).version == OTHER
    assert bench.loader.loads == ["run/v2"]
    assert bench.scheduler.status.waiting == 0


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


def test_log_lines_name_the_requests_that_they_concern():
    bench = Bench()
    bench.loader.errors = {"run/v1": [LoadFailed("damaged")]}
    with capture_logs() as lines:
        for number in range(12):
            bench.ask(NEW, f"new-{number}#{number}")
        bench.ask(OTHER, "other")
        bench.settle()
        bench.ask(BASE, "running")
        bench.turns(1)
        bench.engine.broken = True
        bench.scheduler.run()
    named = {line["event"]: line["request_ids"] for line in lines if "request_ids" in line}
    assert named["load_failed"] == [f"new-{number}" for number in range(8)]
    assert named["engine_failed"] == ["running"]
    assert ["other"] in [line["request_ids"] for line in lines if line["event"] == "loaded"]


def test_nothing_is_loaded_again_when_the_old_weights_were_not_touched():
    bench = Bench()
    bench.loader.errors = {"run/v1": [LoadFailed("damaged")]}
    bench.ask(NEW, "new")
    bench.settle()
    assert (bench.loader.reads, bench.loader.loads) == (["run/v1"], [])
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


def test_everything_is_refused_when_neither_new_nor_old_weights_load():
    bench = Bench()
    bench.loader.errors = {"run/v1": [WeightsTouched("canary")], "base/m": [LoadFailed("gone")]}
    new, other = bench.ask(NEW, "new"), bench.ask(OTHER, "other")
    bench.turns(1)
    later = bench.ask(BASE, "later")
    for refused in (new, other, later):
        with pytest.raises(LoadFailed, match="gone"):
            refused.result(0)
    assert bench.scheduler.status.state is EngineState.FAILED
    assert len(bench.fatal) == 1


def test_a_cancelled_request_is_aborted_in_the_engine():
    bench = Bench()
    long = bench.ask(BASE, "long", steps=50)
    bench.turns(1)
    assert long.cancel(), "as asyncio does when a call is over its deadline, or its caller gone"
    bench.ask(BASE, "next")
    bench.turns(1)
    assert bench.engine.aborted == ["long"]
    assert bench.engine.running == 0


def test_a_cancelled_waiter_causes_no_load():
    bench = Bench()
    bench.ask(BASE, "running", steps=2)
    new = bench.ask(NEW, "new")
    bench.turns(1)
    assert new.cancel()
    bench.settle()
    assert bench.loader.loads == []


def test_a_request_that_the_engine_refuses_fails_alone():
    bench = Bench()
    bad, good = bench.ask(BASE, "bad", steps=101), bench.ask(BASE, "good")
    bench.settle()
    with pytest.raises(SequenceTooLong):
        bad.result(0)
    assert good.result(0).version == BASE


def test_an_engine_that_breaks_fails_all_requests_and_is_reported():
    bench = Bench()
    running, waiting = bench.ask(BASE, "running", steps=3), bench.ask(NEW, "waiting")
    bench.turns(1)
    entering = [bench.ask(BASE, name) for name in ("the first", "the next")]
    bench.engine.broken = True
    bench.scheduler.run()
    later = bench.ask(BASE, "later")
    for refused in (running, waiting, *entering, later):
        with pytest.raises(WorkerDied, match="out of order"):
            refused.result(0)
    assert len(bench.fatal) == 1


def test_an_idle_engine_in_a_thread_of_its_own_wakes_for_a_request():
    bench = Bench()
    thread = threading.Thread(target=bench.scheduler.run, daemon=True)
    thread.start()
    for name in ("a", "b"):
        assert bench.ask(BASE, name).result(timeout=60).version == BASE
    bench.engine.broken = True
    with pytest.raises(WorkerDied):
        bench.ask(BASE, "c").result(timeout=60)
    thread.join(timeout=60)
    assert not thread.is_alive()
