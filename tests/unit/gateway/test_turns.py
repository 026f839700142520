"""Turns of placed workers on their devices, as pure decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.workers.groups import CONTEXT_BYTES
from gateway.workers.overview import Budgets, Demand
from gateway.workers.schedule import explain_wait, schedule
from gateway.workers.steps import (
    AskToYield,
    FindWorker,
    KeepAwake,
    PutToSleep,
    RefuseCalls,
    SleepPlan,
    StartWorker,
    StopWorker,
    TakeGroup,
    WakeWorker,
)
from gateway.workers.table import WorkerRow
from gateway.workers.turns import queue
from tandem.settings.sharing import SharingSettings
from tests.support.gateway.overviews import NOW, overview, row, waits, worker_group

TO_HOST = (SleepPlan("host"), SleepPlan("disk", 100))
GIB = 2**30


def decided(*rows, **about):
    return schedule(overview(*rows, **about))[0]


def test_a_placed_worker_starts_and_a_sleeper_wakes_when_a_call_waits():
    assert decided(row("a", "placed")) == []
    assert decided(row("a", "placed"), demand={"a": waits()}) == [StartWorker("a")]
    assert decided(row("a", "asleep"), demand={"a": waits()}) == [WakeWorker("a")]


def test_the_queue_is_overdue_then_priority_then_share_then_least_recently_served():
    rows = [
        row("first", "asleep", owner="bob"),
        row("poor", "asleep", owner="cai"),
        row("urgent", "asleep", priority=3),
        row("overdue", "asleep"),
        row("served", "asleep", owner="bob"),
    ]
    demand = {each.key: waits() for each in rows}
    demand["overdue"] = waits(since=NOW - 61)
    demand["served"] = waits(served_at=999.0)
    found = overview(*rows, demand=demand, shares={"ann": 0.0, "bob": 9.0, "cai": 1.0})
    order = [each.key for each in queue(found, found.groups["g"])]
    assert order == ["overdue", "urgent", "poor", "first", "served"]


def test_an_idle_worker_yields_after_the_round_trip_of_a_client():
    rows = row("a", "awake", since=NOW - 1), row("b", "asleep")
    demand = {"a": Demand(idle_since=NOW - 0.01), "b": waits()}
    steps, again_at = schedule(overview(*rows, demand=demand))
    assert (steps, again_at) == ([], pytest.approx(NOW + 0.01))
    demand["a"] = Demand(idle_since=NOW - 0.02)
    assert decided(*rows, demand=demand)[0] == AskToYield("a")


def test_a_busy_worker_yields_after_its_quantum_but_not_within_an_open_step():
    rows = row("a", "awake", since=NOW - 5, owner="bob"), row("b", "asleep")
    busy, shares = Demand(uses=1), {"bob": 5.0}
    assert decided(*rows, demand={"a": busy, "b": waits()}, shares=shares) == [AskToYield("a")]
    in_step = replace(busy, open_step=True)
    assert decided(*rows, demand={"a": in_step, "b": waits()}, shares=shares) == []
    overdue = {"a": in_step, "b": waits(since=NOW - 60)}
    assert decided(*rows, demand=overdue, shares=shares) == [AskToYield("a")]


@pytest.mark.parametrize(
    ("own", "others", "quantum"), [(8, 8, 12), (8, 2, 5), (2, 8, 5), (8, 6, 9)]
)
def test_a_quantum_is_longer_than_a_step_if_the_steps_of_both_workers_are(own, others, quantum):
    shares = {"bob": 90.0}
    for seconds, yields in [(quantum - 0.1, False), (quantum, True)]:
        rows = row("a", "awake", since=NOW - seconds, owner="bob"), row("b", "asleep")
        demand = {"a": Demand(uses=1, step_seconds=own), "b": waits(step_seconds=others)}
        steps, again_at = schedule(overview(*rows, demand=demand, shares=shares))
        assert steps == ([AskToYield("a")] if yields else [])
        assert yields or again_at == pytest.approx(NOW + 0.1)


def test_an_idle_worker_yields_at_once_if_its_client_waits_for_another_worker_since():
    groups = worker_group("g"), worker_group("h")
    rows = [row("a", "awake", since=NOW - 1), row("b", "asleep", session="other")]
    rows += [row("e", "asleep", "h", kind="engine"), row("f", "awake", "h", since=NOW - 1)]

    def steps(waited: float, *, switch: float = 0.01, **about):
        demand = {"a": Demand(idle_since=NOW - 0.005, **about), "b": waits(), "f": Demand(uses=1)}
        demand["e"] = waits(since=NOW - waited)
        return decided(*rows, groups=groups, demand=demand, switch_seconds={"g": switch})

    assert steps(0.001)[:1] == [AskToYield("a")]
    assert steps(0.006) == [], "the call waited before, so the client may be in two places"
    assert steps(0.001, open_step=True) == []
    assert steps(0.001, switch=0.2) == [], "a turn is long beside its switches"
    rows[2] = row("e", "asleep", "h", kind="engine", session="other")
    assert steps(0.001) == [], "another session's call says nothing"


def test_a_busy_worker_is_looked_at_again_when_it_has_used_as_much_as_a_waiting_one():
    rows = row("a", "awake", owner="bob"), row("b", "asleep")
    demand = {"a": Demand(uses=1), "b": waits()}
    shares = {"bob": 10.0, "ann": 14.0}
    steps, again_at = schedule(overview(*rows, demand=demand, shares=shares))
    assert (steps, again_at) == ([], NOW + 4)
    settings = SharingSettings(quantum=5, max_wait=60, weights={"bob": 2.0})
    assert schedule(overview(*rows, demand=demand, shares=shares, settings=settings))[1] == NOW + 8
    urgent = row("a", "awake", owner="bob", priority=1), rows[1]
    assert schedule(overview(*urgent, demand=demand, shares=shares))[1] == NOW + 50


def test_a_yielding_worker_sleeps_after_its_last_call_and_keeps_its_devices_until_then():
    rows = row("a", "awake"), row("b", "asleep")
    working = {"a": Demand(uses=1, yielding=True), "b": waits()}
    assert decided(*rows, demand=working) == []
    idle = {"a": Demand(yielding=True), "b": waits()}
    assert [type(step) for step in decided(*rows, demand=idle)] == [PutToSleep]
    moving = row("a", "falling_asleep"), row("b", "asleep")
    assert decided(*moving, demand={"b": waits()}, busy=frozenset("a")) == []


def test_a_worker_goes_on_when_nobody_waits_any_more():
    demand = {"a": Demand(uses=1, yielding=True)}
    assert decided(row("a", "awake"), demand=demand) == [KeepAwake("a")]


def test_a_worker_whose_calls_begin_in_this_decision_does_not_sleep_in_it():
    rows = row("a", "awake"), row("b", "asleep")
    demand = {"a": waits(), "b": waits(since=NOW - 60)}
    assert decided(*rows, demand=demand) == [KeepAwake("a"), AskToYield("a")]
    demand = {"a": waits(yielding=True)}
    assert decided(rows[0], demand=demand) == [KeepAwake("a")]


def test_workers_that_fit_are_awake_side_by_side():
    group = worker_group(awake=2, device_bytes=10)
    rows = row("a", "awake", device_bytes=6), row("b", "asleep", device_bytes=4)
    demand = {"a": Demand(uses=1), "b": waits()}
    assert decided(*rows, demand=demand, groups=(group,)) == [WakeWorker("b")]
    large = row("a", "awake", device_bytes=7), rows[1]
    assert decided(*large, demand=demand, groups=(group,)) == [AskToYield("a")]


def test_a_worker_of_unknown_need_is_alone():
    group = worker_group(awake=3, device_bytes=10)
    for needs in [(0, 1), (1, 0)]:
        rows = row("a", "awake", device_bytes=needs[0]), row("b", "asleep", device_bytes=needs[1])
        demand = {"a": Demand(uses=1), "b": waits()}
        assert decided(*rows, demand=demand, groups=(group,)) == [AskToYield("a")]


def test_each_process_keeps_its_context_on_a_gpu_also_while_it_sleeps():
    group = worker_group(awake=2, on_host=False, device_bytes=10 * GIB)
    rows = [row("a", "awake", device_bytes=4 * GIB), row("b", "asleep", device_bytes=4 * GIB)]
    demand = {"a": Demand(uses=1), "b": waits()}
    assert decided(*rows, demand=demand, groups=(group,)) == [WakeWorker("b")]
    assert CONTEXT_BYTES == GIB
    rows.append(row("c", "asleep", device_bytes=GIB))
    assert decided(*rows, demand=demand, groups=(group,)) == [AskToYield("a")]


def test_as_many_workers_yield_as_the_waiting_one_needs():
    group = worker_group(awake=3, device_bytes=10)
    rows = [row(key, "awake", device_bytes=3) for key in "abc"]
    rows.append(row("d", "asleep", device_bytes=7))
    demand = {key: Demand(uses=1) for key in "abc"} | {"d": waits(since=NOW - 60)}
    assert decided(*rows, demand=demand, groups=(group,)) == [AskToYield("a"), AskToYield("b")]


def test_starts_per_host_are_bounded_and_do_not_hold_up_sleepers():
    groups = worker_group("g", awake=0), worker_group("h", awake=1)
    rows = [row(f"s{n}", "starting") for n in range(4)]
    rows += [row("a", "placed"), row("b", "placed", group="h"), row("c", "asleep", group="h")]
    demand = {key: waits() for key in "abc"}
    busy = frozenset(f"s{n}" for n in range(4))
    assert decided(*rows, demand=demand, groups=groups, busy=busy) == [WakeWorker("c")]


@pytest.mark.parametrize(("policy", "after"), [("eager", 0.02), ("idle_after", 30.0)])
def test_policies_put_idle_workers_to_sleep_though_nobody_waits(policy, after):
    settings = SharingSettings(policy=policy, idle_after=30)
    for idle, asleep in [(after - 0.01, False), (after, True)]:
        demand = {"a": Demand(idle_since=NOW - idle)}
        steps = decided(row("a", "awake", since=0), demand=demand, settings=settings)
        assert bool(steps) == asleep


def test_a_drained_group_is_eager():
    demand = {"a": Demand(idle_since=NOW - 1)}
    group = worker_group(drained=True)
    assert [type(s) for s in decided(row("a", "awake"), demand=demand, groups=(group,))] == [
        PutToSleep
    ]


def test_a_silent_worker_is_killed_sooner_while_others_wait():
    silent = Demand(silent_since=NOW - 15)
    assert decided(row("a", "awake"), demand={"a": silent}) == []
    others = {"a": silent, "b": waits()}
    assert isinstance(decided(row("a", "awake"), row("b", "asleep"), demand=others)[0], StopWorker)
    alone = {"a": Demand(silent_since=NOW - 60)}
    assert isinstance(decided(row("a", "awake"), demand=alone)[0], StopWorker)


@pytest.mark.parametrize("state", ["starting", "waking", "falling_asleep", "lost"])
def test_a_row_between_two_states_is_found_before_anybody_else_has_its_devices(state):
    rows = row("a", state), row("b", "asleep")
    assert decided(*rows, demand={"b": waits()}) == [FindWorker("a")]
    assert decided(*rows, demand={"b": waits()}, busy=frozenset("a")) == []


def test_nobody_starts_while_the_launcher_is_silent_and_awake_workers_serve_on():
    rows = row("a", "placed"), row("b", "awake")
    demand = {"a": waits(), "b": Demand(uses=1)}
    assert decided(*rows, demand=demand, silent={"agent": NOW}) == []


def test_a_group_names_the_launcher_of_each_kind_and_the_silence_of_one_is_that_kinds_alone():
    rows = row("a", "placed"), row("b", "placed", kind="engine")
    demand = {"a": waits(), "b": waits()}
    group = worker_group(awake=0, launchers={"trainer": "agent at a", "engine": "agent at b"})
    about = {"demand": demand, "groups": [group]}
    assert decided(*rows, silent={"agent at b": NOW}, **about) == [StartWorker("a")]
    assert decided(*rows, silent={"agent at a": NOW}, **about) == [StartWorker("b")]


def test_a_row_gets_one_step_at_a_time():
    rows = row("a", "awake"), row("b", "asleep")
    demand = {"a": Demand(silent_since=NOW - 60), "b": waits(since=NOW - 60)}
    assert decided(*rows, demand=demand, silent={"agent": NOW}) == [FindWorker("a")]
    leaving = row("a", "placed", ends_as="waiting")
    assert decided(leaving, demand={"a": waits()}) == [TakeGroup("a")]


@pytest.mark.parametrize("state", ["waiting", "lost", "stopping", "placed", "starting"])
def test_calls_of_an_engine_are_refused_when_nobody_could_serve_them_for_the_patience(state):
    about = {"budgets": Budgets(patience=60), "silent": {"agent": 0.0}, "busy": frozenset("h")}
    rows = row("e", state, kind="engine", since=0), row("h", "awake", since=0)
    for waited, refused in ((59, False), (60, True)):
        demand = {"e": waits(since=NOW - waited)}
        steps, again_at = schedule(overview(*rows, demand=demand, **about))
        assert any(isinstance(step, RefuseCalls) for step in steps) == refused
        assert refused or again_at == NOW + 1
    trainer = row("e", state, since=0)
    steps = decided(trainer, rows[1], demand={"e": waits(since=0)}, **about)
    assert not any(isinstance(step, RefuseCalls) for step in steps), "its session bounds the wait"


def test_calls_of_an_engine_that_waits_for_its_turn_are_not_refused():
    rows = row("e", "placed", kind="engine", since=0), row("h", "awake", since=NOW - 1)
    demand = {"e": waits(since=NOW - 61), "h": Demand(uses=1)}
    assert decided(*rows, demand=demand, budgets=Budgets(patience=60)) == []


def test_whoever_waits_behind_a_lost_worker_is_told_so():
    found = overview(row("a", "lost"), row("b", "asleep"), demand={"b": waits()})
    wait = explain_wait(found, found.rows["b"])
    assert wait is not None
    assert (wait.position, wait.seconds) == (1, 10)
    assert "neither a worker of group g nor its launcher answers" in wait.reason


@pytest.mark.parametrize("state", ["placed", "asleep"])
@pytest.mark.parametrize("on_host", [True, False])
def test_a_decision_about_one_large_group_looks_at_each_row_a_few_times(state, on_host):
    looks = []

    class CountedRow(WorkerRow):
        @property
        def has_process(self) -> bool:
            looks.append(self.key)
            return super().has_process

    rows = [row("h", "awake", since=990)]
    rows += [row(f"k{n}", state, device_bytes=GIB, host_bytes=GIB) for n in range(300)]
    counted = [CountedRow(**vars(each)) for each in rows]
    demand = {each.key: waits() for each in rows} | {"h": Demand(uses=1)}
    group = worker_group(device_bytes=80 * GIB, workers=0, on_host=on_host)
    budgets = Budgets(host_bytes=2**45)
    schedule(overview(*counted, groups=(group,), demand=demand, budgets=budgets))
    assert len(looks) < 20 * len(rows)
