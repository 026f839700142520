from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.agent import process_identity
from tandem.agent.process_identity import process_start
from tandem.stack import ENDPOINT_NAME, Endpoint, Stack, read_endpoint
from tandem.stack.supervised_process import SupervisedProcess
from tests.support.waiting import wait_until


@pytest.fixture
def supervised(clock) -> SupervisedProcess:
    return SupervisedProcess(
        name="gateway", command=[], environment={}, log_path=Path("none"), patience=10, clock=clock
    )


def test_the_waits_double_with_each_end_of_the_last_minute(supervised, clock):
    waits = []
    for _ in range(4):
        supervised.note_end()
        waits.append(supervised.due - clock.now)
    assert waits == [0.25, 0.5, 1, 2]
    clock.now += 61
    assert supervised.note_end() == 1
    assert supervised.due - clock.now == 0.25


def test_only_the_ends_of_the_last_minute_are_counted(supervised, clock):
    counted = []
    for _ in range(8):
        counted.append(supervised.note_end())
        clock.now += 20
    assert counted == [1, 2, 3, 4, 4, 4, 4, 4], "one every 20 s is never five within a minute"


def test_one_that_ends_before_it_serves_is_given_up_however_slowly_it_starts(supervised, clock):
    counted = []
    for _ in range(5):
        counted.append(supervised.note_end(served=False))
        clock.now += 100
    assert counted == [1, 2, 3, 4, 5]
    assert supervised.note_end(served=True) == 1


def test_nothing_is_started_before_its_time(supervised, clock):
    supervised.start_process = lambda: started.append(clock.now)
    started: list[float] = []
    supervised.note_end()
    supervised.start_when_due()
    assert started == []
    clock.now = supervised.due
    supervised.start_when_due()
    assert started == [clock.now]


@pytest.mark.parametrize("gone", [BrokenPipeError, SystemExit])
def test_the_stack_goes_on_when_nobody_reads_what_it_says(tmp_path, gone):
    def tell(sentence: str) -> None:
        raise gone

    stack = Stack(data_dir=tmp_path, tell=tell, say=tell)
    stack._tell("a gateway has ended")
    stack._say("a run is being saved")


def test_who_waits_for_the_stack_hears_of_an_end_that_failed(tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError("no memory")

    stack = Stack(data_dir=tmp_path)
    monkeypatch.setattr(stack, "_supervise", lambda: None)
    monkeypatch.setattr(stack._agent, "stop_process", fail)
    stack._run()
    with pytest.raises(OSError, match="no memory"):
        stack.wait()


def test_a_stack_that_ended_leaves_no_descriptors(tmp_path, monkeypatch):
    def descriptors() -> set[Path]:
        return set(Path("/proc/self/fd").iterdir())

    before = descriptors()
    stack = Stack(data_dir=tmp_path)
    monkeypatch.setattr(stack, "_supervise", lambda: None)
    stack._run()
    # A client that an earlier test left in a thread may open a connection now.
    wait_until(lambda: descriptors() <= before)


def announce(folder: Path, *, pid: int, since: str) -> Endpoint:
    endpoint = Endpoint(url="http://127.0.0.1:9", pid=pid, process_start=since, api_key="tml-x")
    (folder / ENDPOINT_NAME).write_text(endpoint.model_dump_json())
    return endpoint


def test_a_gateway_runs_where_its_own_process_does(tmp_path, monkeypatch):
    me = os.getpid()
    assert read_endpoint(tmp_path) is None
    announced = announce(tmp_path, pid=me, since=process_start(me))
    assert read_endpoint(tmp_path) == announced
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(process_identity, "namespace", lambda: "another container ")
        announce(tmp_path, pid=me, since=process_start(me))
    assert read_endpoint(tmp_path) is None, "its number is that of a process here"


def test_a_gateway_whose_number_another_process_has_now_does_not_run(tmp_path):
    announce(tmp_path, pid=os.getpid(), since=process_start(1))
    assert read_endpoint(tmp_path) is None
    announce(tmp_path, pid=2**22 + 1, since="")
    assert read_endpoint(tmp_path) is None, "there is no such process"
