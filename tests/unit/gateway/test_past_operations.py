"""The cost of a start and of expired results with a long journal."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import func, insert, select

from gateway.metrics import Metrics
from gateway.runs.journal import Journal
from gateway.storage.database import Database
from gateway.storage.futures.table import FutureTable, Result
from gateway.storage.tables import operations
from tandem.errors import GatewayRestarted, UnknownRequest
from tests.support.postgres import on_sqlite, url_for
from tests.support.work import database_work

pytestmark = pytest.mark.usefixtures("each_database")

MANY = 5000


def ended(run_id: str, seq_id: int, *, ago: float, result: bytes | None = None) -> dict:
    at = time.time() - ago
    return {
        "run_id": run_id,
        "seq_id": seq_id,
        "kind": "optim_step",
        "state": "done",
        "request": b"{}",
        "digest": b"",
        "accepted_at": at,
        "ended_at": at,
        "media": "json" if result else "",
        "result": result,
    }


@asynccontextmanager
async def journal_of(folder, *rows: dict):
    """The journal of a gateway that starts with these rows."""
    folder.mkdir(exist_ok=True)
    database = Database(url=url_for(folder), data_dir=folder)
    await database.open()
    await database.write(insert(operations), *rows)
    await database.close()
    with database_work() as work:
        database = Database(url=url_for(folder), data_dir=folder)
        await database.open()
        metrics = Metrics()
        futures = FutureTable(
            folder=folder, result_ttl=60, bytes_in_memory=0, max_samples=1, metrics=metrics
        )
        journal = Journal(
            database=database, data_dir=folder, futures=futures, metrics=metrics, result_ttl=60
        )
        try:
            yield journal, work
        finally:
            await database.close()


@on_sqlite
@pytest.mark.parametrize("task", ["expire", "abandon"])
async def test_neither_a_start_nor_expiry_looks_at_the_operations_of_the_past(task, tmp_path):
    steps = []
    for count in (10, MANY):
        rows = [ended("s-1:train:0", number, ago=100) for number in range(count)]
        async with journal_of(tmp_path / str(count), *rows) as (journal, work):
            before = work.steps
            await getattr(journal, task)()
            steps.append(work.steps - before)
    assert steps[1] < steps[0] + 1000


async def test_results_that_nobody_fetched_expire_in_small_batches(tmp_path):
    rows = [ended("s-1:train:0", number, ago=100, result=b"{}") for number in range(1, MANY)]
    young = ended("s-1:train:0", MANY, ago=1, result=b"{}")
    async with journal_of(tmp_path, *rows, young) as (journal, work):
        await journal.expire()
        assert work.most_rows <= 500
        left = select(func.count()).select_from(operations).where(operations.c.result.is_not(None))
        assert await journal.database.read_value(left) == 1
        assert isinstance(await journal.recall("s-1:train:0:1"), UnknownRequest)
        assert await journal.recall(f"s-1:train:0:{MANY}") == Result(media="json", body=b"{}")


async def test_what_had_not_ended_is_failed_at_a_start_and_nothing_else(tmp_path):
    done = ended("s-1:train:0", 1, ago=1, result=b"{}")
    lost = ended("s-1:train:0", 2, ago=1) | {"state": "accepted", "ended_at": None}
    async with journal_of(tmp_path, done, lost) as (journal, _):
        assert await journal.abandon() == 1
        assert await journal.recall("s-1:train:0:1") == Result(media="json", body=b"{}")
        assert isinstance(await journal.recall("s-1:train:0:2"), GatewayRestarted)
