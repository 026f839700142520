"""The table of workers: rows and events, in memory and in the database."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.storage.database import Database
from gateway.workers.requests import WorkerRequest
from gateway.workers.table import (
    OCCUPYING,
    TRANSITIONS,
    WorkerEvent,
    WorkerRow,
    WorkerTable,
)
from tandem.errors import IllegalTransition, StorageFailed
from tests.support.gateway.memory_table import MemoryTable
from tests.support.postgres import url_for
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.usefixtures("each_database")

REQUEST = WorkerRequest(
    key="s/qwen/16#1",
    kind="engine",
    owner="ann",
    session="s",
    groups=("g", "h"),
    together=("s/qwen/16",),
    priority=-1,
    model="models/qwen",
)
ROW = WorkerRow(
    request=REQUEST,
    group="g",
    state="waking",
    token=(7 << 20) + 3,
    process="p:1",
    reason="it is next",
    since=12.5,
    holders=("s",),
    ends_as="waiting",
    overtaken=2,
)


@pytest.fixture(params=["memory", "database"])
async def table(request, tmp_path):
    if request.param == "memory":
        yield MemoryTable()
        return
    database = Database(url=url_for(tmp_path), data_dir=tmp_path)
    await database.open()
    yield WorkerTable(database)
    await database.close()


async def test_a_row_comes_back_as_it_was_and_is_deleted_when_it_is_gone(table):
    await table.write([ROW], [WorkerEvent(ROW)])
    assert await table.read() == [ROW]
    changed = replace(ROW, state="awake", reason="", since=13.0)
    await table.write([changed], [])
    assert await table.read() == [changed]
    table.write_soon([replace(ROW, state="gone")], [])
    await table.write([], [])
    assert await table.read() == []


async def test_rows_come_in_the_order_of_their_since(table):
    rows = [replace(ROW, request=replace(REQUEST, key=str(n)), since=9.0 - n) for n in range(3)]
    await table.write(rows, [])
    assert [row.key for row in await table.read()] == ["2", "1", "0"]


async def test_events_add_up_to_the_seconds_of_each_owner(table):
    for owner, seconds in (("ann", 2.0), ("bob", 1.0), ("ann", 0.5)):
        row = replace(ROW, request=replace(REQUEST, owner=owner))
        await table.write([], [WorkerEvent(row, seconds)])
    assert await table.busy_seconds() == {"ann": 2.5, "bob": 1.0}


async def test_drained_groups_are_kept(table):
    await table.set_drained("g", drained=True)
    await table.set_drained("g", drained=True)
    await table.set_drained("h", drained=True)
    await table.set_drained("h", drained=False)
    assert await table.drained() == ["g"]


def test_a_row_moves_only_along_its_transitions():
    for state, followers in TRANSITIONS.items():
        for other in TRANSITIONS:
            row = replace(ROW, state=state)
            if other in followers:
                assert row.moved(other, at=20.0).since == 20.0
            else:
                with pytest.raises(IllegalTransition):
                    row.moved(other, at=20.0)


def test_only_the_end_of_a_process_or_its_sleep_frees_devices():
    freeing = {
        (state, after)
        for state in OCCUPYING
        for after in TRANSITIONS[state]
        if after not in OCCUPYING
    }
    assert {after for _, after in freeing} == {"asleep", "placed", "waiting", "gone"}


def test_after_its_end_a_row_is_placed_waits_or_is_gone():
    stopping = replace(ROW, state="stopping")
    waiting = stopping.ended(at=20.0)
    assert (waiting.state, waiting.group, waiting.ends_as) == ("waiting", "", "placed")
    placed = replace(stopping, ends_as="placed").ended(at=20.0)
    assert (placed.state, placed.group, placed.process) == ("placed", "g", "")
    assert replace(stopping, ends_as="gone").ended(at=20.0).state == "gone"


async def test_an_intention_is_refused_while_results_before_it_wait_for_the_storage(
    tmp_path, monkeypatch
):
    database = Database(url=url_for(tmp_path), data_dir=tmp_path)
    await database.open()
    table = WorkerTable(database)
    with monkeypatch.context() as broken:
        broken.setattr(
            "gateway.storage.database.write_batch",
            lambda _connection, batch, _epoch: [StorageFailed("the disk is away")] * len(batch),
        )
        table.write_soon([ROW], [])
        await until(lambda: database.postpones)
    awake = replace(ROW, state="awake", token=ROW.token + 1)
    with pytest.raises(StorageFailed):
        await table.write([awake], [])
    await until(lambda: not database.postpones)
    assert await database.flush()
    assert await table.read() == [ROW]
    await table.write([awake], [])
    assert await table.read() == [awake]
    await database.close()


async def test_an_intention_does_not_overtake_a_result_that_is_refused_at_that_moment(
    tmp_path, monkeypatch
):
    database = Database(url=url_for(tmp_path), data_dir=tmp_path)
    await database.open()
    table = WorkerTable(database)
    began, goes_on = threading.Event(), threading.Event()

    def refuse_late(_connection: object, batch: Sequence[object], _epoch: int) -> list[Exception]:
        began.set()
        assert goes_on.wait(PATIENCE)
        return [StorageFailed("the disk is away")] * len(batch)

    awake = replace(ROW, state="awake", token=ROW.token + 1)
    with monkeypatch.context() as broken:
        broken.setattr("gateway.storage.database.write_batch", refuse_late)
        table.write_soon([ROW], [])
        assert await asyncio.to_thread(began.wait, PATIENCE)
    intended = asyncio.create_task(table.write([awake], []))
    await asyncio.sleep(0)
    goes_on.set()
    with pytest.raises(StorageFailed):
        await intended
    await until(lambda: not database.postpones)
    assert await database.flush()
    assert await table.read() == [ROW]
    await database.close()
