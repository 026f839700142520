"""What happened to a run and its workers."""

from __future__ import annotations

import itertools

import pytest

from gateway.runs.record.events import worker_changes
from tests.support.gateway.requests import finish
from tests.support.gateway.runs import SELDOM, Run, train
from tests.support.waiting import wait_until

_times = itertools.count(1)


def rows(*changes: tuple[str, str], key: str = "r", kind: str = "trainer") -> list[dict]:
    """Return rows of `worker_events` from states and groups."""
    return [
        {
            "at": float(next(_times)),
            "key": key,
            "kind": kind,
            "state": state,
            "group_name": group,
            "reason": f"why {state}",
        }
        for state, group in changes
    ]


def told(*changes: tuple[str, str], **about: str) -> list[str]:
    return [event.event for event in worker_changes(rows(*changes, **about))]


FIRST = [("waiting", ""), ("placed", "g0"), ("starting", "g0"), ("awake", "g0")]
AGAIN = [("starting", "g0"), ("awake", "g0")]


def test_a_trainer_starts_once_and_is_restored_after_its_process_ended():
    died = [("placed", "g0"), *AGAIN]
    assert told(*FIRST, *died) == ["started", "stopped", "restored"]
    assert told(*FIRST, *died, kind="engine") == ["started", "stopped", "started"]


def test_sleeps_and_wakes_and_moves_are_told():
    turn = [("falling_asleep", "g0"), ("asleep", "g0"), ("waking", "g0"), ("awake", "g0")]
    assert told(*FIRST, *turn) == ["started", "slept", "woken"]
    moved = [("stopping", "g0"), ("waiting", ""), ("placed", "g1"), ("starting", "g1")]
    assert told(*FIRST, *moved, ("awake", "g1"), kind="engine") == [
        *("started", "stopped", "started"),
        "moved",
    ]


def test_a_list_that_begins_in_the_middle_invents_nothing():
    assert told(("awake", "g0"), ("falling_asleep", "g0"), ("asleep", "g0")) == ["slept"]
    assert told(("gone", "g0")) == []


@pytest.fixture
def gate(start):
    with start(recovery=SELDOM) as gate:
        yield gate


def test_the_events_of_a_run_that_was_restored_and_ended(gate, no_wait):
    run = Run.new(gate)
    train(run, 1)
    run.die("it was killed by SIGKILL")
    train(run, 2)
    finish(run.client, run.session_id)
    where = f"/api/tandem/v1/runs/{run.id}/events"

    def events() -> list[dict]:
        return run.client.get(where).json()["events"]

    wait_until(lambda: [each["event"] for each in events()].count("stopped") == 2)
    found = events()
    assert [each["at"] for each in found] == sorted(each["at"] for each in found)
    assert {each["key"] for each in found} == {run.id}
    named = [each["event"] for each in found]
    assert named[:4] == ["created", "started", "stopped", "restored"]
    assert sorted(named[4:]) == ["ended", "stopped"]
    assert "SIGKILL" in found[2]["reason"] and found[1]["group"] == "cpu"
