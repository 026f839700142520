"""An engine reads weights while it samples from others. Only then does it drain."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from sampler_service.engine import EngineState, SleepLevel
from sampler_service.weights.loader import Verified
from sampler_service.weights.read_ahead import ReadAhead
from tandem.errors import LoadFailed
from tests.support.fake_engine import BASE, NEW, OTHER, Bench, LaterReads
from tests.support.published_adapters import RANK, adapter, write_base
from tests.support.waiting import wait_until


def bench_that_reads_later(**arguments: Any) -> tuple[Bench, LaterReads]:
    reads = LaterReads()
    return Bench(start_reading=reads, **arguments), reads


def test_requests_of_the_loaded_version_are_admitted_until_the_other_was_read():
    bench, reads = bench_that_reads_later(patience=2.0)
    bench.ask(BASE, "first", steps=3)
    new = bench.ask(NEW, "new")
    bench.turns(1)
    bench.now += 10.0
    bench.ask(BASE, "while it is read", steps=3)
    bench.turns(1)
    assert bench.engine.admitted == ["first", "while it is read"]
    reads.finish()
    reads.at_once = True
    late = bench.ask(BASE, "afterwards")
    bench.settle()
    assert bench.engine.admitted == ["first", "while it is read", "new", "afterwards"]
    assert (new.result(0).version, late.result(0).version) == (NEW, BASE)


def test_a_version_is_read_once_for_all_who_wait_and_one_at_a_time():
    bench, reads = bench_that_reads_later()
    bench.ask(BASE, "running", steps=20)
    answers = [bench.ask(version, f"{i}") for i, version in enumerate([NEW, OTHER, NEW])]
    load = bench.scheduler.load(NEW)
    bench.turns(3)
    assert len(reads.begun) == 1
    reads.finish()
    while bench.scheduler.status.running:
        bench.turns(1)
    bench.turns(2)
    assert bench.scheduler.status.version == NEW and load.done()
    assert len(reads.begun) == 1, "the other is read while requests for the first run"
    reads.finish()
    bench.settle()
    assert [answer.result(0).version for answer in answers] == [NEW, OTHER, NEW]
    assert bench.loader.reads == ["run/v1", "run/v2"]


@pytest.mark.parametrize("error", [LoadFailed("damaged"), KeyError("damaged")])
def test_a_version_that_cannot_be_read_fails_while_requests_of_the_old_one_run(error):
    bench, reads = bench_that_reads_later()
    bench.loader.errors = {"run/v1": [error]}
    running = bench.ask(BASE, "running", steps=9)
    new, other = bench.ask(NEW, "new"), bench.ask(OTHER, "other")
    bench.turns(1)
    reads.finish()
    bench.turns(1)
    with pytest.raises(LoadFailed, match="damaged"):
        new.result(0)
    assert not running.done() and bench.scheduler.status.state is EngineState.AWAKE
    reads.finish()
    reads.at_once = True
    bench.settle()
    assert (running.result(0).version, other.result(0).version) == (BASE, OTHER)
    assert bench.loader.loads == ["run/v2"]


def test_a_version_that_failed_is_read_again_for_those_who_ask_later():
    bench, reads = bench_that_reads_later()
    bench.loader.errors = {"run/v1": [LoadFailed("not there yet")]}
    for expected in (LoadFailed, type(None)):
        new = bench.ask(NEW, expected.__name__)
        bench.turns(1)
        reads.finish()
        bench.settle()
        assert isinstance(new.exception(0), expected)


def test_reading_ends_when_nobody_waits_for_the_version():
    bench, reads = bench_that_reads_later()
    bench.ask(BASE, "running", steps=9)
    new = bench.ask(NEW, "new")
    bench.turns(1)
    assert new.cancel()
    bench.turns(1)
    reads.finish()
    assert bench.loader.reads == [], "it ended before the first piece"
    bench.settle()
    assert bench.loader.loads == []


def test_what_was_read_is_forgotten_when_nobody_waits_for_it():
    bench, reads = bench_that_reads_later()
    bench.ask(BASE, "running", steps=9)
    new, other = bench.ask(NEW, "new"), bench.ask(OTHER, "other")
    bench.turns(1)
    reads.finish()
    assert new.cancel()
    bench.turns(1)
    reads.finish()
    bench.settle()
    assert other.result(0).version == OTHER
    assert (bench.loader.reads, bench.loader.loads) == (["run/v1", "run/v2"], ["run/v2"])


def test_a_version_that_is_not_read_in_time_fails_and_the_engine_goes_on():
    bench, reads = bench_that_reads_later(timeout=100.0)
    new = bench.ask(NEW, "new")
    bench.turns(1)
    assert bench.scheduler._reader.seconds_left == 100.0, "how long an idle engine waits for it"
    bench.now += 100.5
    old = bench.ask(BASE, "old")
    bench.turns(1)
    with pytest.raises(LoadFailed, match="not read within 100 s"):
        new.result(0)
    assert old.result(0).version == BASE
    reads.finish()  # the read that hung
    assert bench.loader.reads == []


def test_a_version_whose_reading_ends_at_the_moment_of_the_look_is_not_late():
    reads = LaterReads()
    reader = ReadAhead(
        lambda version, _go_on: Verified(version),
        timeout=100.0,
        clock=lambda: 0.0,
        on_done=lambda: None,
        start=reads,
    )
    reader.want(NEW)
    result = reader._reading.result
    done = result.done

    def ends_after_the_look() -> bool:
        was = done()
        reads.finish()
        return was

    result.done = ends_after_the_look
    assert reader.outcome(NEW) is None
    assert reader.outcome(NEW) == Verified(NEW)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


def test_an_adapter_that_is_not_read_in_time_fails_and_keeps_nobody_waiting(
    base: Path, tmp_path: Path
):
    bench, reads = bench_that_reads_later(timeout=100.0, base=base, rank=RANK)
    running = bench.ask(BASE, "running", steps=3)
    stuck, load = bench.ask(adapter(tmp_path, 1), "a"), bench.scheduler.load(adapter(tmp_path, 2))
    bench.turns(3)
    assert running.result(0).version == BASE and len(reads.begun) == 1
    bench.now += 100.5
    later = bench.ask(BASE, "later")
    bench.turns(1)
    with pytest.raises(LoadFailed, match="not read within 100 s"):
        stuck.result(0)
    assert later.result(0).version == BASE
    reads.finish()
    bench.settle()
    assert load.result(0).version.name == "run/v2"
    assert set(bench.scheduler.status.adapters) == {"run/v2"}


def test_an_adapter_takes_the_weights_of_another_version_away_only_once_it_was_read(
    base: Path, tmp_path: Path
):
    bench, reads = bench_that_reads_later(base=base, rank=RANK)
    first = bench.ask(NEW, "first")
    bench.turns(1)
    reads.finish()
    bench.settle()
    answer = bench.ask(adapter(tmp_path, 5), "a")
    bench.turns(1)
    assert first.done() and bench.loader.reads == ["run/v1"] and len(reads.begun) == 1
    other = bench.ask(BASE, "base")
    bench.turns(1)
    _, read_base = reads.begun
    read_base()
    bench.turns(2)
    assert other.result(0).version == BASE and not answer.done(), "its adapter is still read"
    reads.finish()
    bench.settle()
    assert answer.result(0).version.adapter


def test_an_idle_engine_in_a_thread_of_its_own_loads_what_was_read_and_notices_who_gave_up():
    reads = LaterReads()
    bench = Bench(start_reading=reads)
    threading.Thread(target=bench.scheduler.run, daemon=True).start()
    given_up = bench.ask(OTHER, "given up")
    wait_until(lambda: reads.begun)
    assert given_up.cancel()
    wait_until(lambda: bench.scheduler.status.waiting == 0)
    new = bench.ask(NEW, "new")
    wait_until(lambda: len(reads.begun) == 2)
    assert bench.ask(BASE, "meanwhile").result(timeout=60).version == BASE
    reads.finish()
    assert new.result(timeout=60).version == NEW
    assert bench.loader.reads == ["run/v1"]


@pytest.mark.parametrize("level", SleepLevel)
def test_what_waits_is_read_during_a_sleep_and_loaded_by_the_wake(level: SleepLevel):
    bench, reads = bench_that_reads_later()
    bench.scheduler.sleep(level)
    new = bench.ask(NEW, "new")
    bench.turns(2)
    assert bench.scheduler.status.state is EngineState.ASLEEP
    reads.finish()
    bench.scheduler.wake()
    bench.settle()
    assert new.result(0).version == NEW
    assert bench.loader.reads == ["run/v1"]


def test_a_wake_waits_for_what_is_being_read():
    bench = Bench()
    bench.scheduler.sleep(SleepLevel.DROP_WEIGHTS)
    bench.turns(1)
    done = threading.Event()

    def read_in_a_thread(read) -> None:
        threading.Thread(target=lambda: (done.wait(60), read()), daemon=True).start()

    bench.scheduler._reader._start = read_in_a_thread
    wake = bench.scheduler.wake()
    threading.Timer(0.05, done.set).start()
    bench.turns(1)
    assert wake.done() and bench.loader.loads == ["base/m"]
    assert wake.result(0).phases["read"] > 0


def test_the_thread_of_a_version_that_is_given_up_ends():
    began, ended = threading.Event(), threading.Event()

    def verify(version, go_on) -> Verified:
        began.set()
        try:
            while True:
                go_on()
        finally:
            ended.set()

    start = {"timeout": 60.0, "clock": lambda: 0.0, "on_done": lambda: None}
    reader = ReadAhead(
        verify, start=lambda read: threading.Thread(target=read, daemon=True).start(), **start
    )
    reader.want(NEW)
    assert began.wait(60)
    reader.want(None)
    assert ended.wait(60)
