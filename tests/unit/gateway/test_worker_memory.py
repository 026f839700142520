"""Memory of workers, as pure decisions: ways to sleep, and ends for lack of room."""

from __future__ import annotations

from gateway.workers.groups import CONTEXT_BYTES
from gateway.workers.memory import sleep_plans, sleepers_in_the_way, why_not_on_host
from gateway.workers.overview import Budgets, Demand, WorkerBytes
from gateway.workers.schedule import schedule
from gateway.workers.steps import (
    KeepAwake,
    PutToSleep,
    SleepPlan,
    StopWorker,
    WakeWorker,
)
from tests.support.gateway.overviews import NOW, overview, row, waits, worker_group

GPU = worker_group(on_host=False, device_bytes=2**40)


def plans(one, *others, host=0, disk=0, following=None, group=GPU, **sizes):
    budgets = Budgets(host_bytes=host, disk_bytes=disk)
    found = overview(one, *others, budgets=budgets, groups=(group,), sizes=sizes)
    return sleep_plans(found, one, following=following)


def test_a_trainer_sleeps_in_host_memory_and_else_on_disk():
    trainer, said = row("t", "awake"), WorkerBytes(measured=True, device=6)
    assert plans(trainer, t=said) == (SleepPlan("host"),)
    assert plans(trainer, host=10, disk=20, t=said) == (
        SleepPlan("host", 8),
        SleepPlan("disk", 13),
    )
    assert plans(trainer, host=5, disk=20, t=said) == (SleepPlan("disk", 13),)
    refused = plans(trainer, host=5, disk=5, t=said)
    assert "TANDEM_HOST_MEMORY_BYTES" in refused and "TANDEM_SPILL_DIR" in refused


def test_an_engine_can_always_drop_its_weights():
    engine = row("e", "awake", kind="engine", device_bytes=6)
    assert plans(engine, host=10) == (SleepPlan("host", 6), SleepPlan("drop"))
    assert plans(engine, host=5) == (SleepPlan("drop"),)


def test_sleeps_under_way_and_sleepers_count():
    trainer, said = row("t", "awake"), WorkerBytes(measured=True, device=6)
    other = row("u", "falling_asleep")
    for there in (
        WorkerBytes(measured=True, host=5),
        WorkerBytes(measured=True, reserved_host=5),
    ):
        assert plans(trainer, other, host=10, disk=6, t=said, u=there) == (SleepPlan("disk", 6),)


def test_on_cores_a_sleeper_leaves_host_memory_if_the_next_worker_would_not_fit_beside_it():
    cores = worker_group()
    trainer, said = row("t", "awake", host_bytes=6), WorkerBytes(measured=True, device=6, awake=6)
    following = row("u", "placed", host_bytes=5)
    about = {"host": 10, "disk": 9, "group": cores, "t": said}
    assert plans(trainer, following, **about)[0] == SleepPlan("host")
    assert plans(trainer, following, following=following, **about) == (SleepPlan("disk", 7),)


def test_a_worker_without_room_to_sleep_stays_awake_and_is_killed_after_the_longest_wait():
    rows = row("a", "awake", device_bytes=6), row("b", "asleep", device_bytes=6)
    about = {"groups": (GPU,), "budgets": Budgets(host_bytes=5)}
    demand = {"a": Demand(yielding=True), "b": waits()}
    assert isinstance(schedule(overview(*rows, demand=demand, **about))[0][0], KeepAwake)
    demand = {"a": Demand(yielding=True, refused_at=NOW - 60), "b": waits(since=NOW - 60)}
    assert isinstance(schedule(overview(*rows, demand=demand, **about))[0][0], StopWorker)
    roomy = {"groups": (GPU,)}
    (step,) = schedule(overview(*rows, demand=demand, **roomy))[0]
    assert isinstance(step, PutToSleep) and step.or_kill


def test_a_worker_waits_for_host_memory_until_it_is_overdue_and_then_a_sleeper_ends():
    rows = [row("a", "asleep", host_bytes=6), row("b", "placed", host_bytes=6)]
    sizes = {"a": WorkerBytes(measured=True, device=6)}
    about = {"budgets": Budgets(host_bytes=10), "sizes": sizes}
    found = overview(*rows, demand={"b": waits()}, **about)
    assert "TANDEM_HOST_MEMORY_BYTES" in why_not_on_host(found, rows[1])
    assert [each.key for each in sleepers_in_the_way(found, rows[1])] == ["a"]
    steps, again_at = schedule(found)
    assert (steps, again_at) == ([], NOW + 50)
    overdue = {"b": waits(since=NOW - 60)}
    (step,) = schedule(overview(*rows, demand=overdue, **about))[0]
    assert isinstance(step, StopWorker) and step.key == "a"
    ending = overview(*rows, demand=overdue, busy=frozenset("a"), **about)
    assert schedule(ending)[0] == []


def test_a_sleeper_that_left_bytes_on_the_device_ends_for_an_overdue_worker():
    group = worker_group(on_host=False, device_bytes=10 + 2 * CONTEXT_BYTES)
    rows = row("a", "asleep", device_bytes=9), row("b", "asleep", device_bytes=9)
    about = {"groups": (group,), "sizes": {"a": WorkerBytes(measured=True, device=2)}}
    assert schedule(overview(*rows, demand={"b": waits()}, **about))[0] == []
    (step,) = schedule(overview(*rows, demand={"b": waits(since=NOW - 60)}, **about))[0]
    assert isinstance(step, StopWorker) and step.key == "a"
    assert schedule(overview(*rows, demand={"b": waits()}, groups=(group,)))[0] == [WakeWorker("b")]


def test_a_worker_that_sleepers_leave_no_bytes_for_holds_up_nobody_else():
    group = worker_group(device_bytes=10 + 3 * CONTEXT_BYTES, on_host=False)
    rows = [row("a", "asleep", device_bytes=9), row("b", "asleep", device_bytes=9)]
    rows.append(row("c", "asleep", device_bytes=5))
    sizes = {"a": WorkerBytes(measured=True, device=2)}
    demand = {"b": waits(since=NOW - 20), "c": waits()}
    about = {"groups": (group,), "sizes": sizes}
    assert schedule(overview(*rows, demand=demand, **about))[0] == [WakeWorker("c")]
    rows[2] = row("c", "awake", device_bytes=5)
    demand["c"] = Demand(uses=1)
    assert schedule(overview(*rows, demand=demand, **about))[0] == [], "nobody sleeps in vain"
