from __future__ import annotations

import shutil
import time

import pytest
from sqlalchemy import func, insert, select, update

from gateway.owners.auth.identity import Caller
from gateway.owners.usage.meter import Subject, UsageMeter
from gateway.owners.usage.reports import BillingReports
from gateway.storage import tables
from gateway.storage.database import Database
from gateway.storage.retention import Retention
from gateway.storage.tables import metadata
from tests.support.postgres import url_for
from tests.support.work import database_work

pytestmark = pytest.mark.usefixtures("each_database")

DAY = 86_400.0
KEPT = 30 * DAY
ADMIN = Caller(owner="local", key_id="k-1", role="admin")


class History:
    """A database with sessions of different ages, each with a run of two operations, a sampling
    session and a collected weight version."""

    def __init__(self, database: Database, folder) -> None:
        self.database = database
        self.folder = folder
        self.retention = Retention(
            database=database, data_dir=folder, history_ttl=KEPT, audit_ttl=400 * DAY
        )

    async def add(self, session: str, *, days_ago: float | None) -> None:
        """With `days_ago` None it has not ended."""
        at = None if days_ago is None else time.time() - days_ago * DAY
        state = {"state": "active" if at is None else "ended", "ended_at": at, "created_at": 1.0}
        run = f"{session}:train:0"
        about = {"session_id": session, "base_model": "tiny"}
        await self._insert("sessions", id=session, owner="local", project_id="p", **state)
        await self._insert("runs", id=run, owner="local", training={}, **about, **state)
        for seq_id in (0, 1):
            await self.add_operation(run, seq_id, at=at)
        await self._insert(
            "sampling_sessions",
            id=f"{session}:sample:0",
            kind="base",
            version="b",
            **about,
            **state,
        )
        await self._insert(
            "weight_versions", name=f"{run}/v000001-aaaaaaaa", run_id=run, base_model="tiny",
            path="/x", step=1, bytes=1, created_at=1.0, collected_at=at,
        )  # fmt: skip

    async def add_operation(self, run: str, seq_id: int, *, at: float | None) -> None:
        await self._insert(
            "operations", run_id=run, seq_id=seq_id, kind="optim_step", request=b"{}", digest=b"",
            accepted_at=1.0, state="accepted" if at is None else "done", ended_at=at,
        )  # fmt: skip

    async def add_step(self, run: str, seq_id: int) -> None:
        await self._insert(
            "training_steps", run_id=run, seq_id=seq_id, step=seq_id, at=1.0, seconds=1.0,
            tokens=1, weight_version="", metrics={},
        )  # fmt: skip

    async def add_checkpoint(self, run: str) -> None:
        path = f"tinker://{run}/weights/a"
        await self._insert(
            "checkpoints", path=path, run_id=run, kind="weights", base_model="tiny", step=1,
            bytes=1, optimizer=True, owner="local", created_at=1.0,
        )  # fmt: skip

    async def _insert(self, table: str, **row) -> None:
        await self.database.write(insert(metadata.tables[table]), row)

    async def rows(self) -> dict[str, int]:
        names = [name for name in metadata.tables if name != "audit"]
        counts = {
            name: await self.database.read_value(
                select(func.count()).select_from(metadata.tables[name])
            )
            for name in names
        }
        return {name: count for name, count in counts.items() if count}


@pytest.fixture
async def history(tmp_path):
    with database_work() as work:
        database = Database(url=url_for(tmp_path), data_dir=tmp_path)
        await database.open()
        found = History(database, tmp_path)
        found.work = work
        yield found
        await database.close()


ONE = {
    "sessions": 1, "runs": 1, "operations": 2, "sampling_sessions": 1,
    "weight_versions": 1,
}  # fmt: skip


async def test_what_ended_long_ago_goes_and_what_is_young_or_goes_on_stays(history):
    await history.add("s-old", days_ago=31)
    await history.add("s-young", days_ago=29)
    await history.add("s-active", days_ago=None)
    await history.retention.remove_old()
    assert await history.rows() == {name: 2 * count for name, count in ONE.items()}
    for table in (tables.sessions, tables.sampling_sessions, tables.runs):
        left = {row["id"] for row in await history.database.read(select(table.c.id))}
        assert not [name for name in left if name.startswith("s-old")]


async def test_usage_remains_and_is_still_that_of_its_project(history):
    await history.add("s-old", days_ago=31)
    meter = UsageMeter(database=history.database)
    subject = Subject(id="s-old:train:0", session_id="s-old", owner="local", base_model="tiny")
    meter.record("forward", subject, input_tokens=5)
    meter.write()
    hour = int(time.time()) // 3600 * 3600
    reports = BillingReports(database=history.database, usage=meter)

    async def reported(project: str):
        window = {"starting_on": hour - 3600, "ending_before": hour + 7200}
        report = await reports.events(ADMIN, project_id=project, **window)
        return [(event.quantity, event.project_id, event.session_id) for event in report.events]

    before = await reported("p")
    assert before == [(5, "p", "s-old")]
    await history.retention.remove_old()
    assert await history.rows() == {"usage": 1}
    assert (await reported("p"), await reported("q")) == (before, [])


async def test_a_run_stays_with_its_session_while_it_has_a_checkpoint_or_files(history):
    await history.add("s-named", days_ago=100)
    await history.add_checkpoint("s-named:train:0")
    await history.add("s-files", days_ago=100)
    folder = history.folder / "checkpoints" / "s-files_train_0"
    folder.mkdir(parents=True)
    for seq_id in range(3):
        await history.add_step("s-named:train:0", seq_id)
        await history.add_step("s-files:train:0", seq_id)
    await history.retention.remove_old()
    kept = {"sessions": 2, "runs": 2, "checkpoints": 1, "training_steps": 6}
    assert await history.rows() == kept
    folder.rmdir()
    await history.retention.remove_old()
    kept = {"sessions": 1, "runs": 1, "checkpoints": 1, "training_steps": 3}
    assert await history.rows() == kept, "steps stay and go with their run"


async def test_a_run_stays_until_its_record_is_removed(history, monkeypatch):
    await history.add("s-old", days_ago=100)
    record = history.folder / "runs" / "s-old_train_0" / "record"
    record.mkdir(parents=True)
    with monkeypatch.context() as disk:
        disk.setattr(shutil, "rmtree", lambda *_, **__: None)  # as on a read-only disk
        await history.retention.remove_old()
    assert (await history.rows())["runs"] == 1
    await history.retention.remove_old()
    assert (await history.rows(), record.parent.exists()) == ({}, False)


async def test_operations_and_samplers_of_a_run_that_goes_on_for_months_go_too(history):
    await history.add("s-long", days_ago=None)
    for seq_id in range(2, 1300):
        await history.add_operation("s-long:train:0", seq_id, at=time.time() - KEPT - seq_id)
    ended = {"state": "ended", "ended_at": 1.0}
    await history.database.write(update(tables.sampling_sessions).values(ended))
    history.work.most_rows = 0
    await history.retention.remove_old()
    assert await history.rows() == {name: n for name, n in ONE.items() if n > 1} | {
        "sessions": 1, "runs": 1, "weight_versions": 1, "operations": 3,
    }, "the newest says where the run is"  # fmt: skip
    assert history.work.most_rows == 500, "other writes pass between batches"


async def test_the_audit_log_keeps_a_time_of_its_own(history):
    for days in (500, 399):
        row = {"at": time.time() - days * DAY, "actor": "a", "action": "b", "status": 200}
        await history.database.write(insert(tables.audit), row)
    await history.retention.remove_old()
    assert len(await history.database.read(select(tables.audit))) == 1


async def test_changes_of_workers_stay_for_a_week(history):
    worker = {"key": "s:train:0", "kind": "trainer", "owner": "ann", "session_id": "s"}
    for days in (8, 6):
        row = worker | {"at": time.time() - days * DAY, "state": "awake"}
        await history.database.write(insert(tables.worker_events), row)
    await history.retention.remove_old()
    (left,) = await history.database.read(select(tables.worker_events))
    assert left["at"] > time.time() - 7 * DAY
