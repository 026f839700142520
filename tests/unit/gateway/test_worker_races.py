"""Rows whose holders, processes or storage change while something else waits: in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from tandem.errors import StorageFailed, WorkerDied
from tests.support.gateway.worker_cluster import TRAINER, Cluster, opened, use
from tests.support.virtual_time import in_virtual_time


async def until(cluster: Cluster, condition: Callable[[], bool]) -> None:
    while not condition():
        await cluster.supervisor.roster.changed()


async def soon(waited_for):
    async with asyncio.timeout(100):
        return await waited_for


@in_virtual_time
async def test_the_end_of_a_process_that_is_being_killed_already_is_noticed():
    cluster = await opened()
    await cluster.supervisor.place([TRAINER], holder="r")
    process = await use(cluster, "t")
    await asyncio.sleep(1)
    cluster.supervisor.note_failure("t", process, "it is broken")
    await soon(cluster.supervisor.end_process("t", process, "it is broken"))
    assert cluster.processes == {}


@in_virtual_time
async def test_a_use_of_a_row_that_was_never_durable_ends():
    cluster = await opened()
    cluster.table.failing = 1
    placing = asyncio.create_task(cluster.supervisor.place([TRAINER], holder="r"))
    await asyncio.sleep(0)
    await cluster.supervisor.place([TRAINER], holder="r")
    with pytest.raises(WorkerDied):
        await soon(use(cluster, "t"))
    with pytest.raises(StorageFailed):
        await placing


@pytest.mark.parametrize("failing", [1, 2])
@in_virtual_time
async def test_of_two_holders_that_come_at_once_the_written_ones_have_the_row(failing):
    cluster = await opened()
    cluster.table.failing = failing
    placing = [
        asyncio.create_task(cluster.supervisor.place([TRAINER], holder=run)) for run in ("a", "b")
    ]
    ended = await asyncio.gather(*placing, return_exceptions=True)
    assert [isinstance(each, StorageFailed) for each in ended] == [True, failing == 2]
    await asyncio.sleep(1)
    rows = cluster.supervisor.roster.rows
    assert rows == cluster.table.rows
    assert {key: row.holders for key, row in rows.items()} == (
        {"t": ("b",)} if failing == 1 else {}
    )


@in_virtual_time
async def test_an_engine_that_could_not_come_back_is_released_by_its_old_holder():
    cluster = await opened("g", "h")
    sampler = [replace(TRAINER, key=key, kind="engine", sampler="e") for key in ("e", "e#1")]
    await cluster.supervisor.place(sampler, holder="e")
    await use(cluster, "e#1")
    await cluster.supervisor.resize("e", sampler[:1], within=5, keeping=["e", "e#1"])
    cluster.table.failing = 1
    with pytest.raises(StorageFailed):
        await cluster.supervisor.resize("e", sampler, within=5)
    await soon(cluster.supervisor.release("e#1", holder="e"))
    assert {*cluster.table.rows} == {"e"}


@in_virtual_time
async def test_an_intention_that_was_taken_back_is_not_in_the_table():
    cluster = await opened()
    for key in ("t", "u"):
        await cluster.supervisor.place([replace(TRAINER, key=key)], holder="r")
    await use(cluster, "t")
    await use(cluster, "u")
    waking = asyncio.create_task(use(cluster, "t"))
    rows = cluster.supervisor.roster.rows
    await until(cluster, lambda: rows["u"].state == "asleep")
    cluster.table.failing = 1
    await until(cluster, lambda: rows["t"].state == "waking")
    await cluster.supervisor.place([TRAINER], holder="another")  # this writes the row, too
    assert rows["t"].state == "asleep"
    await asyncio.sleep(0.1)
    assert cluster.table.rows == rows
    await waking


@in_virtual_time
async def test_a_process_on_a_group_that_is_gone_loses_its_place_also_when_it_is_killed():
    cluster = await opened("g", "h")
    await cluster.supervisor.place([TRAINER], holder="r")
    process = await use(cluster, "t")
    group = cluster.table.rows["t"].group
    cluster.groups = [each for each in cluster.groups if each.name != group]
    cluster.table.rows["t"] = replace(cluster.table.rows["t"], state="waking")
    cluster.processes[process].frozen = True
    await cluster.restart(holders={"r"})
    assert await soon(use(cluster, "t")) != process
    assert cluster.table.rows["t"].group != group


@in_virtual_time
async def test_engines_that_could_not_be_noted_as_leaving_stay():
    cluster = await opened("g", "h")
    sampler = [replace(TRAINER, key=key, kind="engine", sampler="e") for key in ("e", "e#1")]
    await cluster.supervisor.place(sampler, holder="e")
    cluster.table.failing = 1
    with pytest.raises(StorageFailed):
        await cluster.supervisor.resize("e", sampler[:1], within=5, keeping=["e", "e#1"])
    await asyncio.sleep(1)
    assert cluster.supervisor.held_by("e") == ["e", "e#1"]
    assert cluster.table.rows == cluster.supervisor.roster.rows


@in_virtual_time
async def test_a_row_that_is_released_while_another_one_ends_is_requested_anew():
    cluster = await opened()
    both = [TRAINER, replace(TRAINER, key="u")]
    await cluster.supervisor.place(both, holder="r")
    for key in ("t", "u"):
        await use(cluster, key)
    cluster.supervisor.let_go("u", holder="r")
    placing = asyncio.create_task(cluster.supervisor.place(both, holder="another"))
    await asyncio.sleep(0.03)
    cluster.supervisor.let_go("t", holder="r")
    await placing
    assert await soon(use(cluster, "t")) in cluster.processes


@in_virtual_time
async def test_a_silent_worker_of_a_silent_launcher_is_asked_every_few_seconds():
    cluster = await opened()
    await cluster.supervisor.place([TRAINER], holder="r")
    process = await use(cluster, "t")
    found, find = [], cluster.find
    cluster.find = lambda row, group: found.append(row.key) or find(row, group)
    cluster.supervisor.note_launcher("agent", answers=False)
    cluster.freeze(cluster.processes[process])
    await asyncio.sleep(160)
    assert 10 <= len(found) <= 25
