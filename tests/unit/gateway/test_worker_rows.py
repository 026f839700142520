"""The rows of workers under a supervisor, in named situations and virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from gateway.metrics import GROUP_GAUGES, Metrics
from gateway.workers.requests import WorkerRequest
from gateway.workers.supervisor import Supervisor
from gateway.workers.worker_metrics import WorkerMetrics
from tandem.errors import (
    InvalidRequest,
    NoRoom,
    StorageFailed,
    WorkerDied,
    WorkerStartFailed,
)
from tests.support.gateway.worker_cluster import TRAINER, Cluster, opened, use
from tests.support.virtual_time import in_virtual_time, run_in_virtual_time


def engine(key: str, **about) -> WorkerRequest:
    sampler = key.partition("#")[0]
    return replace(TRAINER, key=key, kind="engine", sampler=sampler, **about)


def state(cluster: Cluster, key: str) -> str:
    rows = cluster.supervisor.roster.rows
    return rows[key].state if key in rows else "gone"


@in_virtual_time
async def test_a_use_of_an_awake_worker_costs_no_write_and_no_turn_of_the_loop(monkeypatch):
    cluster = await opened()
    await cluster.supervisor.place([TRAINER], holder="r")
    await use(cluster, "t")
    await asyncio.sleep(10)
    events, pokes = len(cluster.table.events), []
    monkeypatch.setattr(cluster.supervisor, "poke", lambda: pokes.append(1))
    began = asyncio.get_running_loop().time()
    for _ in range(100):
        await use(cluster, "t")
    assert len(cluster.table.events) == events
    assert asyncio.get_running_loop().time() == began
    assert pokes == []


@in_virtual_time
async def test_a_failed_start_is_told_to_waiting_calls_and_the_next_use_starts_again():
    cluster = await opened()
    await cluster.supervisor.place([TRAINER], holder="r")
    cluster.failing = 1
    with pytest.raises(WorkerStartFailed, match="the model cannot be read"):
        await use(cluster, "t")
    assert await use(cluster, "t") in cluster.processes


@in_virtual_time
async def test_a_new_process_has_another_name():
    cluster = await opened()
    await cluster.supervisor.place([TRAINER], holder="r")
    first = await use(cluster, "t")
    cluster.die(cluster.processes[first])
    assert await use(cluster, "t") != first


@in_virtual_time
async def test_a_shared_row_ends_with_its_last_holder():
    cluster = await opened()
    for run in ("r1", "r2"):
        await cluster.supervisor.place([TRAINER], holder=run)
    await use(cluster, "t")
    await cluster.supervisor.release("t", holder="r1")
    assert state(cluster, "t") == "awake"
    await cluster.supervisor.release("t", holder="r2")
    assert cluster.table.rows == cluster.processes == {}


@in_virtual_time
async def test_a_release_ends_waits_and_a_start():
    cluster = await opened()
    await cluster.supervisor.place([TRAINER], holder="r")
    cluster.seconds = 2
    waiting = asyncio.create_task(use(cluster, "t"))
    await asyncio.sleep(3)
    assert state(cluster, "t") == "starting"
    await cluster.supervisor.release("t", holder="r")
    with pytest.raises(WorkerDied, match="was released"):
        await waiting
    assert cluster.table.rows == cluster.processes == {}


@in_virtual_time
async def test_a_request_that_no_empty_group_can_serve_is_refused():
    cluster = await opened(device_bytes=8, on_host=True)
    with pytest.raises(InvalidRequest, match="there can be no place for it"):
        await cluster.supervisor.place([replace(TRAINER, device_bytes=9)], holder="r")
    assert cluster.table.rows == {}


@in_virtual_time
async def test_a_row_that_the_database_refuses_leaves_nothing_behind():
    cluster = await opened()
    cluster.table.failing = 1
    with pytest.raises(StorageFailed):
        await cluster.supervisor.place([TRAINER], holder="r")
    await asyncio.sleep(10)
    assert cluster.supervisor.roster.rows == cluster.table.rows == {}
    await cluster.supervisor.place([TRAINER], holder="r")
    cluster.table.failing = 1
    with pytest.raises(StorageFailed):
        await cluster.supervisor.place([TRAINER], holder="another")
    await use(cluster, "t")
    await cluster.supervisor.release("t", holder="r")
    assert cluster.table.rows == cluster.processes == {}


@pytest.mark.parametrize("step", ["a start", "a wake", "a sleep"])
def test_a_use_waits_while_the_database_refuses_and_then_goes_on(step):
    async def scenario():
        cluster = await opened()
        for key in ("t", "u"):
            await cluster.supervisor.place([replace(TRAINER, key=key)], holder="r")
        if step != "a start":
            await use(cluster, "t")
        if step == "a wake":
            await use(cluster, "u")
            await cluster.supervisor.end_process("u", cluster.table.rows["u"].process, "over")
        processes, key = {*cluster.processes}, "u" if step == "a sleep" else "t"
        cluster.table.failing = 10**6
        waiting = asyncio.create_task(use(cluster, key))
        await asyncio.sleep(100)
        assert not waiting.done() and {*cluster.processes} == processes
        wait = cluster.supervisor.explain(key)
        assert wait.reason and wait.seconds == pytest.approx(100, abs=1)
        tried = 10**6 - cluster.table.failing
        assert tried < 500, "it does not ask a failing database without a pause"
        cluster.table.failing = 0
        async with asyncio.timeout(2):
            await waiting
        assert processes <= {*cluster.processes}

    run_in_virtual_time(scenario())


@in_virtual_time
async def test_while_a_launcher_is_silent_a_killed_worker_keeps_its_devices():
    cluster = await opened()
    for key in ("t", "u"):
        await cluster.supervisor.place([replace(TRAINER, key=key)], holder="r")
    process = await use(cluster, "t")
    cluster.silent = True
    cluster.freeze(cluster.processes[process])
    waiting = asyncio.create_task(use(cluster, "u"))
    await asyncio.sleep(200)
    assert (state(cluster, "t"), waiting.done()) == ("stopping", False)
    assert cluster.supervisor.explain("u").reason
    cluster.answer()
    await waiting
    assert state(cluster, "t") == "placed"


@in_virtual_time
async def test_a_silent_worker_of_a_silent_launcher_is_lost_and_killed_when_the_launcher_answers():
    cluster = await opened()
    await cluster.supervisor.place([TRAINER], holder="r")
    process = await use(cluster, "t")
    cluster.silent = True
    cluster.supervisor.note_launcher("agent", answers=False)
    assert await use(cluster, "t", seconds=100) == process, "it serves on"
    cluster.freeze(cluster.processes[process])
    await asyncio.sleep(100)
    assert (state(cluster, "t"), [*cluster.processes]) == ("lost", [process])
    cluster.supervisor.note_launcher("agent", answers=True)
    cluster.answer()
    assert await use(cluster, "t") != process


@in_virtual_time
async def test_a_worker_that_nobody_can_find_after_a_restart_is_lost_until_somebody_answers():
    cluster = await opened()
    for key in ("t", "u"):
        await cluster.supervisor.place([replace(TRAINER, key=key)], holder="r")
    process = await use(cluster, "t")
    cluster.processes[process].frozen = cluster.silent = True
    await cluster.restart(holders={"r"})
    waiting = asyncio.create_task(use(cluster, "u"))
    await asyncio.sleep(100)
    assert (state(cluster, "t"), waiting.done()) == ("lost", False)
    cluster.processes[process].frozen = cluster.silent = False
    await waiting
    assert process in cluster.processes, "it was found, and slept"


@in_virtual_time
async def test_a_new_gateway_keeps_every_worker_and_ends_rows_of_ended_holders():
    cluster = await opened("g", "h")
    for key in ("t", "u"):
        await cluster.supervisor.place([replace(TRAINER, key=key)], holder=key)
    processes = [await use(cluster, key) for key in ("t", "u")]
    await cluster.restart(holders={"t"})
    assert await use(cluster, "t") == processes[0]
    await asyncio.sleep(1)
    assert [*cluster.processes] == [processes[0]]


@in_virtual_time
async def test_a_worker_without_room_to_sleep_shows_why_and_ends_after_the_longest_wait():
    cluster = await opened()
    cluster.full = True
    for key in ("t", "u"):
        await cluster.supervisor.place([replace(TRAINER, key=key)], holder="r")
    process = await use(cluster, "t")
    waiting = asyncio.create_task(use(cluster, "u"))
    await asyncio.sleep(60)
    assert "its state is too large" in cluster.supervisor.explain("u").reason
    assert process in cluster.processes
    await waiting
    assert 120 <= asyncio.get_running_loop().time() < 130
    assert process not in cluster.processes


@in_virtual_time
async def test_a_sampler_gets_all_its_new_engines_or_none():
    cluster = await opened("g", "h", "i", workers=1)
    sampler = [engine("e")]
    await cluster.supervisor.place(sampler, holder="e")
    await cluster.supervisor.place([TRAINER], holder="r")
    await use(cluster, "e")
    more = [*sampler, engine("e#1"), engine("e#2")]
    with pytest.raises(NoRoom, match="and there is room for 1: "):
        await cluster.supervisor.resize("e", more, within=5)
    with pytest.raises(InvalidRequest, match="another engine of the same sampler"):
        await cluster.supervisor.resize("e", [*more, engine("e#3")], within=5)
    await asyncio.sleep(1)
    assert {*cluster.table.rows} == {"e", "t"}
    await cluster.supervisor.resize("e", [*sampler, engine("e#1")], within=5)
    await use(cluster, "e#1")
    await cluster.supervisor.resize("e", sampler, within=5)
    await asyncio.sleep(1)
    assert ({*cluster.table.rows}, len(cluster.processes)) == ({"e", "t"}, 1)


@in_virtual_time
async def test_a_trainer_keeps_the_engines_that_its_sampler_is_resized_to():
    cluster = await opened("g", "h", workers=2)
    await cluster.supervisor.place([engine("e")], holder="e")
    await cluster.supervisor.place([replace(TRAINER, together=("e",))], holder="r")
    await cluster.supervisor.resize("e", [engine("e"), engine("e#1")], within=5)
    overview = cluster.supervisor.overview()
    assert overview.is_kept(overview.rows["e#1"])
    assert overview.rows["e#1"].group


@in_virtual_time
async def test_a_drained_group_stays_drained_for_the_next_gateway():
    cluster = await opened("g", "h")
    await cluster.supervisor.drain("g", drained=True)
    await cluster.restart(holders=set())
    await cluster.supervisor.place([TRAINER], holder="r")
    await use(cluster, "t")
    assert cluster.table.rows["t"].group == "h"


@in_virtual_time
async def test_each_change_is_an_event_that_lanes_and_usage_read():
    cluster = await opened()
    await cluster.supervisor.place([TRAINER], holder="r")
    await use(cluster, "t", seconds=3.0)
    await cluster.supervisor.release("t", holder="r")
    states = [event.row.state for event in cluster.table.events]
    assert states == ["waiting", "placed", "starting", "awake", "stopping", "gone"]
    assert await cluster.table.busy_seconds() == pytest.approx({"ann": 3.0})


@in_virtual_time
async def test_a_worker_whose_group_is_gone_ends_and_is_placed_anew():
    cluster = await opened("g", "h")
    await cluster.supervisor.place([TRAINER], holder="r")
    process = await use(cluster, "t")
    cluster.groups = [group for group in cluster.groups if group.name == "h"]
    await cluster.restart(holders={"r"})
    assert await use(cluster, "t") != process
    assert (cluster.table.rows["t"].group, len(cluster.processes)) == ("h", 1)


@in_virtual_time
async def test_after_a_restart_with_other_devices_a_worker_goes_on_and_the_next_one_has_the_new():
    cluster = await opened(devices=("cuda:0",))
    await cluster.supervisor.place([TRAINER], holder="r")
    process = await use(cluster, "t")
    cluster.groups = [replace(cluster.groups[0], devices=("cuda:1",))]
    await cluster.restart(holders={"r"})
    assert await use(cluster, "t") == process
    cluster.die(cluster.processes[process])
    after = cluster.processes[await use(cluster, "t")]
    assert after.group.devices == ("cuda:1",)


@in_virtual_time
async def test_a_worker_with_too_few_devices_after_a_restart_ends_and_waits_for_another_group():
    cluster = await opened("g", devices=("cuda:0", "cuda:1"))
    await cluster.supervisor.place([replace(TRAINER, ranks=2)], holder="r")
    process = await use(cluster, "t")
    cluster.groups = [replace(cluster.groups[0], devices=("cuda:0",))]
    await cluster.restart(holders={"r"})
    waiting = asyncio.create_task(use(cluster, "t"))
    await asyncio.sleep(10)
    assert (state(cluster, "t"), [*cluster.processes]) == ("waiting", [])
    assert cluster.supervisor.explain("t").reason
    cluster.groups = [*cluster.groups, replace(cluster.groups[0], name="h", devices=("a", "b"))]
    waiting.cancel()
    await cluster.restart(holders={"r"})
    assert await use(cluster, "t") != process


@pytest.mark.parametrize("forgets_cancelled", [False, True], ids=["committed", "not committed"])
def test_a_restart_at_any_moment_of_a_switch_continues_and_keeps_each_process(forgets_cancelled):
    async def life(moment: float) -> None:
        cluster = await opened()
        cluster.table.forgets_cancelled = forgets_cancelled
        for key in ("t", "u"):
            await cluster.supervisor.place([replace(TRAINER, key=key)], holder="r")
        uses = asyncio.create_task(use_both(cluster))
        await asyncio.sleep(moment)
        uses.cancel()
        await asyncio.gather(uses, return_exceptions=True)
        before = {*cluster.processes}
        await cluster.restart(holders={"r"})
        await use_both(cluster)
        cluster.supervisor.raise_fault()
        assert before <= {*cluster.processes}
        assert len(cluster.processes) == 2

    async def use_both(cluster: Cluster) -> None:
        for key in ("t", "u", "t"):
            await use(cluster, key, seconds=0.01)

    for moment in range(120):
        run_in_virtual_time(life(moment * 0.005))


@in_virtual_time
async def test_a_scrape_looks_at_all_rows_once():
    cluster = await opened()
    for key in "tuv":
        await cluster.supervisor.place([replace(TRAINER, key=key)], holder="r")
    metrics, looks = Metrics(), []
    look = cluster.supervisor.overview
    WorkerMetrics(metrics).watch(["g"], lambda: looks.append(1) or look())
    text = generate_latest(metrics.registry).decode()
    assert len(looks) == 1
    assert all(f'tandem_gateway_{name}{{group="g"}}' in text for name in GROUP_GAUGES)


@in_virtual_time
async def test_a_disk_that_hangs_has_no_room_and_is_asked_once():
    cluster, asked = await opened(), []
    answer = asyncio.Event()

    async def free_on_disk() -> int:
        asked.append(1)
        await answer.wait()
        return 7

    supervisor = Supervisor(cluster.supervisor.roster, free_on_disk=free_on_disk)
    await supervisor.open()
    await asyncio.sleep(100)
    assert (len(asked), supervisor.roster.budgets.disk_bytes) == (1, 0)
    answer.set()
    await asyncio.sleep(10)
    assert supervisor.roster.budgets.disk_bytes == 7
    await supervisor.close()
