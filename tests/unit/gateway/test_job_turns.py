"""Jobs among workers that take turns, as pure decisions."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from gateway.workers.groups import EVERYTHING
from gateway.workers.overview import Budgets, Demand
from gateway.workers.schedule import explain_wait, schedule
from gateway.workers.steps import (
    AskToYield,
    KeepAwake,
    PlaceRows,
    PutToSleep,
    RefuseCalls,
    SleepPlan,
    StartWorker,
    TakeGroup,
    WakeWorker,
)
from tandem.settings.sharing import SharingSettings
from tests.support.gateway.overviews import NOW, overview, row, waits, worker_group


def group(name: str = "g", **changes):
    return worker_group(name, kinds=EVERYTHING, **changes)


def suspending(**changes):
    """A group of one device, whose host can suspend a process."""
    return group(**{"no_suspender": "", "on_host": False, "device_bytes": 8} | changes)


def decided(*rows, groups=(), **about):
    return schedule(overview(*rows, groups=groups or (group(),), **about))[0]


_times = st.sampled_from([0.0, NOW - 600, NOW - 61, NOW - 1])
_demands = st.builds(
    Demand,
    uses=st.integers(0, 1),
    waiting=st.integers(0, 1),
    waiting_since=_times,
    idle_since=_times,
    served_at=_times,
    started_at=_times,
    yielding=st.booleans(),
    open_step=st.booleans(),
    refused_at=_times,
)
_others = st.lists(
    st.tuples(
        st.sampled_from(["trainer", "engine", "job"]),
        st.sampled_from(["waiting", "placed", "asleep"]),
        st.integers(0, 9),
        st.integers(0, 8),
        _demands,
    ),
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(
    others=_others,
    demand=_demands,
    awake=st.integers(0, 2),
    drained=st.booleans(),
    policy=st.sampled_from(["deferred", "eager", "idle_after"]),
    since=st.sampled_from([0.0, NOW - 600, NOW - 1]),
    need=st.integers(0, 8),
    ranks=st.integers(1, 2),
)
def test_no_decision_takes_the_devices_of_a_running_job_that_cannot_be_suspended(
    others, demand, awake, drained, policy, since, need, ranks
):
    rows = [row("job", "awake", kind="job", since=since, device_bytes=need, ranks=ranks)]
    demands = {"job": demand}
    for number, (kind, state, priority, size, said) in enumerate(others):
        state = "placed" if kind == "job" and state == "asleep" else state
        about = {"kind": kind, "priority": priority, "device_bytes": size, "owner": f"o{number}"}
        rows.append(row(f"k{number}", state, **about))
        demands[f"k{number}"] = said
    reason = "it cannot" if ranks == 1 else ""
    there = group(awake=awake, drained=drained, device_bytes=8, no_suspender=reason)
    about = {"settings": SharingSettings(quantum=5, max_wait=60, policy=policy)}
    steps, _ = schedule(overview(*rows, groups=(there,), demand=demands, **about))
    of_job = [step for step in steps if getattr(step, "key", "") == "job"]
    assert {type(step).__name__ for step in of_job} <= {"KeepAwake"}


@pytest.mark.parametrize(
    ("owner", "uses", "holder"),
    [("ann", 0, "the job a"), ("ann", 1, "the job a"), ("bo", 1, "a job")],
)
def test_a_higher_priority_waits_for_the_end_of_a_running_job_and_is_told_so(owner, uses, holder):
    rows = row("a", "awake", kind="job", since=0, owner=owner), row("b", "placed", priority=9)
    about = {"demand": {"a": Demand(uses=uses), "b": waits(since=NOW - 600)}}
    assert decided(*rows, **about) == []
    found = overview(*rows, groups=(group(),), **about)
    wait = explain_wait(found, found.rows["b"])
    assert wait is not None
    assert (wait.position, wait.seconds) == (1, 600)
    said = f"1st in the queue for the devices of group g: {holder} holds devices of group g"
    assert wait.reason == f"{said} until it ends: nobody can suspend processes there"


@pytest.mark.parametrize("state", ["placed", "asleep"])
def test_calls_of_an_engine_behind_a_job_are_refused_after_the_patience(state):
    rows = row("a", "awake", kind="job", since=0), row("e", state, kind="engine")
    about = {"groups": (group(),), "budgets": Budgets(patience=60)}
    demand = {"a": Demand(uses=1), "e": waits(since=NOW - 59)}
    assert schedule(overview(*rows, demand=demand, **about)) == ([], NOW + 1)
    demand["e"] = waits(since=NOW - 60)
    refused, *_ = decided(*rows, demand=demand, **about)
    assert isinstance(refused, RefuseCalls)
    assert "nobody could serve it within 60 s (1st in the queue" in refused.reason
    assert "the job a holds devices of group g until it ends" in refused.reason


def test_a_worker_that_fits_beside_a_job_is_awake_beside_it():
    there = group(awake=2, device_bytes=10)
    rows = row("a", "awake", kind="job", device_bytes=6), row("b", "placed", device_bytes=4)
    demand = {"a": Demand(uses=1), "b": waits()}
    assert decided(*rows, groups=(there,), demand=demand) == [StartWorker("b")]


def test_a_job_gets_its_devices_in_turn_and_by_priority():
    rows = row("a", "placed", kind="job"), row("b", "asleep", priority=1)
    demand = {"a": waits(), "b": waits()}
    assert [step.key for step in decided(*rows, demand=demand)] == ["b"]
    holding = row("a", "placed", kind="job"), row("b", "awake", since=NOW - 60)
    assert decided(*holding, demand={"a": waits(), "b": Demand(uses=1)}) == [AskToYield("b")]
    assert decided(rows[0], demand={"a": waits()}) == [StartWorker("a")]


def test_a_new_worker_gets_a_group_without_a_job_if_there_is_one():
    groups = group("g"), group("h")
    rows = [
        row("job", "awake", "g", kind="job"),
        row("t", "awake", "h"),
        row("u", "asleep", "h"),
        row("new"),
    ]
    (step,) = decided(*rows, groups=groups, demand={"job": Demand(uses=1), "new": waits()})
    assert isinstance(step, PlaceRows)
    assert [(each.key, each.group) for each in step.rows] == [("new", "h")]


def test_a_job_stays_on_a_drained_group_until_its_attempt_ends_and_then_leaves():
    there = group(drained=True)
    running = row("a", "awake", kind="job", since=0)
    assert decided(running, groups=(there,), demand={"a": Demand()}) == []
    between = row("a", "placed", kind="job")
    assert decided(between, groups=(there,), demand={"a": waits()}) == [TakeGroup("a")]
    trainer = row("a", "placed")
    assert decided(trainer, groups=(there,), demand={"a": waits()}) == [StartWorker("a")]


# --- Jobs that the host can suspend ---------------------------------------------------------------


def test_a_job_of_one_process_yields_after_its_time_awake_and_is_suspended_after_its_use():
    there = {"groups": (suspending(),), "budgets": Budgets(host_bytes=20)}
    b, demand = row("b", "placed"), {"a": Demand(uses=1), "b": waits(since=NOW - 2)}
    job = row("a", "awake", kind="job", since=NOW - 1)
    assert schedule(overview(job, b, demand=demand, **there)) == ([], NOW + 4)
    job = row("a", "awake", kind="job", since=NOW - 5)
    assert decided(job, b, demand=demand, **there) == [AskToYield("a")]
    demand["a"] = Demand(uses=1, yielding=True)
    assert decided(job, b, demand=demand, **there) == []
    demand["a"] = waits(since=NOW, yielding=True)
    step = PutToSleep("a", (SleepPlan("host", 8),))
    assert decided(job, b, demand=demand, **there) == [step]


def test_a_suspended_job_wakes_in_its_turn():
    job, b = row("a", "asleep", kind="job"), row("b", "awake", since=NOW - 60)
    demand, there = {"a": waits(), "b": Demand(uses=1)}, {"groups": (suspending(),)}
    assert decided(job, b, demand=demand, **there) == [AskToYield("b")]
    assert decided(job, row("b", "asleep"), demand={"a": waits()}, **there) == [WakeWorker("a")]


@pytest.mark.parametrize("policy", ["deferred", "eager", "idle_after"])
@pytest.mark.parametrize("drained", [False, True])
def test_a_job_is_not_suspended_while_nobody_waits(policy, drained):
    about = {"settings": SharingSettings(policy=policy)}
    job, there = row("a", "awake", kind="job", since=0), suspending(drained=drained)
    for demand in (Demand(uses=1), waits()):
        steps = decided(job, groups=(there,), demand={"a": demand}, **about)
        assert steps in ([], [KeepAwake("a")])


@pytest.mark.parametrize(
    ("job", "demand", "there", "reason"),
    [
        ({"ranks": 2}, {}, {"devices": ("0", "1")}, "it has 2 processes, and only one process can"),
        ({}, {}, {"no_suspender": "cuda-checkpoint is not installed"}, "cuda-checkpoint is not"),
        ({}, {"keeps_devices": True}, {}, "an attempt of it has ended while it was suspended"),
        ({}, {}, {"device_bytes": 99}, "the host has no room for its state: workers use"),
    ],
)
def test_who_waits_for_a_job_that_cannot_be_suspended_sees_why(job, demand, there, reason):
    rows = row("a", "awake", kind="job", since=0, **job), row("b", "placed")
    about = {
        "groups": (suspending(**there),),
        "demand": {"a": Demand(uses=1, **demand), "b": waits(since=NOW - 600)},
        "budgets": Budgets(host_bytes=20),
    }
    assert decided(*rows, **about) == []
    found = overview(*rows, **about)
    wait = explain_wait(found, found.rows["b"])
    assert wait is not None
    assert f"the job a holds devices of group g until it ends: {reason}" in wait.reason


def test_a_yielding_job_goes_on_if_the_host_has_no_room_any_more():
    rows = row("a", "awake", kind="job", since=0), row("b", "placed")
    demand = {"a": waits(yielding=True, refused_at=1.0), "b": waits(since=NOW - 600)}
    about = {"groups": (suspending(),), "budgets": Budgets(host_bytes=7), "demand": demand}
    (step,) = decided(*rows, **about)
    assert isinstance(step, KeepAwake)
    assert "TANDEM_HOST_MEMORY_BYTES" in step.reason


def test_calls_of_an_engine_wait_for_their_turn_behind_a_job_that_can_be_suspended():
    rows = row("a", "awake", kind="job", since=0), row("e", "asleep", kind="engine")
    demand = {"a": Demand(uses=1), "e": waits(since=NOW - 600)}
    about = {"groups": (suspending(),), "budgets": Budgets(patience=60), "demand": demand}
    assert decided(*rows, **about) == [AskToYield("a")]
