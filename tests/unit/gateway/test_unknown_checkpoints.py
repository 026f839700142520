"""Unknown and expired checkpoints. Only its user deletes, replaces or expires a saved one."""

from __future__ import annotations

import time
from typing import cast

import pytest
from sqlalchemy import event, insert
from structlog.testing import capture_logs

from gateway.checkpoints.versions import files_of
from gateway.metrics import Metrics
from gateway.owners.auth.keys import KeyStore, NewKey
from gateway.runs.journal import Journal
from gateway.runs.recovery.snapshots import SnapshotStore
from gateway.storage.futures.table import FutureTable
from gateway.storage.tables import audit, runs
from tandem.errors import CheckpointDamaged
from tests.support.gateway.checkpoint_store import (
    DAY,
    RUN,
    Store,
    checkpoint,
    folder,
    whole,
)
from tests.support.postgres import lose_database, on_sqlite

pytestmark = pytest.mark.usefixtures("each_database")

STATE = "checkpoints/s-1_train_0/a-11111111"


@pytest.fixture
async def store(tmp_path):
    store = Store(tmp_path)
    await store.database.open()
    yield store
    await store.database.close()


async def add_run(store, run_id: str = RUN, *, state: str = "ended") -> None:
    about = dict.fromkeys(("session_id", "base_model", "owner", "project_id"), "x")
    row = {"id": run_id, "state": state, "training": {}, "created_at": 1.0}
    await store.database.write(insert(runs), about | row)


async def test_a_folder_that_the_database_does_not_know_stays_and_is_named_once_at_a_start(store):
    await add_run(store)
    whole(store, STATE)
    await store.checkpoints.put(checkpoint(store, STATE))
    unknown = {
        "checkpoints/s-1_train_0/b-22222222": "checkpoints/s-1_train_0/b-22222222",
        "weights/s-1_train_0/v000001-33333333": "weights/s-1_train_0/v000001-33333333",
        "checkpoints/s-9_train_0/c-44444444": "checkpoints/s-9_train_0",
        "checkpoints/s-9_train_0/d-55555555": "checkpoints/s-9_train_0",
        "snapshots/s-9_train_0/00000001-66666666": "snapshots/s-9_train_0",
    }
    for path in unknown:
        whole(store, path)
    bare = folder(store, "weights/s-9_train_0/v000001-77777777")  # without a file list
    for _ in range(2):
        with capture_logs() as lines:
            await store.collector.collect_all()
        await store.collector.collect(RUN, ended=True)
        await store.collector.collect("s-9:train:0", ended=True)
        await store.collector.empty_trash()
        assert all((store.data_dir / path / "file").exists() for path in (STATE, *unknown))
        assert (bare / "file").exists()
        (warning,) = [line for line in lines if line["log_level"] == "warning"]
        assert warning["folders"] == sorted({*unknown.values(), "weights/s-9_train_0"})


async def test_payloads_of_an_unknown_run_in_the_private_directory_are_reported(tmp_path):
    (data_dir := tmp_path / "data").mkdir()
    payloads = tmp_path / "private/operations/s-9_train_0"
    payloads.mkdir(parents=True)
    store = Store(data_dir, private_dir=tmp_path / "private")
    await store.database.open()
    await store.collector.find_unknown()
    assert store.collector.unknown == {str(payloads)}
    assert await store.collector.warnings()
    payloads.rmdir()
    assert not await store.collector.warnings()
    await store.database.close()


async def test_partial_folders_go_also_those_of_an_unknown_run(store):
    for run in ("s-1_train_0", "s-9_train_0"):
        whole(store, f"checkpoints/{run}/.partial-a-11111111")
    await add_run(store)
    await store.collector.collect_all()
    assert not any(store.data_dir.glob("checkpoints/s-*"))
    assert store.collector.unknown == set()


async def test_the_warning_counts_what_it_does_not_name_and_forgets_what_an_operator_removed(store):
    folders = [f"weights/s-{n}_train_0" for n in range(10, 18)]
    for each in folders:
        whole(store, f"{each}/v000001-11111111")
    await store.collector.collect_all()
    (said,) = await store.collector.warnings()
    assert said.startswith(f"{', '.join(folders[:5])} and 3 more: the database does not know these")
    for each in folders[1:]:
        (store.data_dir / each).rename(store.data_dir / each.replace("/", "-"))
    (said,) = await store.collector.warnings()
    assert said.startswith(f"{folders[0]}: the database does not know these folders")


async def test_snapshots_and_payloads_go_with_a_run_that_is_over_and_stay_of_an_unknown_one(store):
    for run_id, state in ((RUN, "ended"), ("s-2:train:0", "active")):
        await add_run(store, run_id, state=state)
    for run in ("s-1_train_0", "s-2_train_0", "s-9_train_0"):
        whole(store, f"snapshots/{run}/00000001-11111111")
        folder(store, f"operations/{run}")
    journal = Journal(
        database=store.database,
        data_dir=store.data_dir,
        futures=cast(FutureTable, None),
        metrics=Metrics(),
        result_ttl=DAY,
    )
    snapshots = SnapshotStore(
        database=store.database,
        data_dir=store.data_dir,
        checkpoints=store.checkpoints,
        versions=store.versions,
    )
    await journal.abandon()
    await snapshots.remove_ended()

    assert {path.name for path in (store.data_dir / "operations").iterdir()} == {
        "s-2_train_0",
        "s-9_train_0",
    }
    assert {path.name for path in (store.data_dir / "snapshots").iterdir()} == {"s-9_train_0"}


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[]", b'{"files": 1}', None])
async def test_a_record_that_somebody_put_in_its_place_is_damaged(store, content):
    path = whole(store, STATE)
    await store.checkpoints.put(checkpoint(store, STATE))
    with (path / "checkpoint.json").open("wb") as stream:
        if content is None:
            stream.truncate(2**40)
        else:
            stream.write(content)
    with pytest.raises(CheckpointDamaged):
        files_of(checkpoint(store, STATE), path)


@pytest.mark.parametrize("end", ["deleted", "replaced", "expired"])
async def test_what_its_user_gave_up_goes_at_once(store, end):
    path = whole(store, STATE)
    saved = checkpoint(store, STATE, expires_at=1.0 if end == "expired" else None)
    await store.checkpoints.put(saved)
    if end == "deleted":
        await store.checkpoints.delete(saved)
    elif end == "replaced":
        other = "checkpoints/s-1_train_0/a-22222222"
        whole(store, other)
        await store.checkpoints.put(checkpoint(store, other))
    else:
        await store.checkpoints.expire()
        await store.checkpoints.change(saved, expired_at=time.time() - DAY)
        await store.checkpoints.expire()
    await store.collector.collect_all()  # as after a crash before the files' end
    assert not path.exists()
    assert store.collector.unknown == set()


async def test_a_clock_that_is_ahead_hides_a_checkpoint_and_loses_nothing(store, monkeypatch):
    path, now = whole(store, STATE), time.time()
    await store.checkpoints.put(checkpoint(store, STATE, expires_at=now + 7200))

    async def housekeeping(clock: float) -> bool:
        """Return whether the checkpoint is usable at this time."""
        monkeypatch.setattr("time.time", lambda: clock)
        await store.checkpoints.expire()
        await store.collector.collect(RUN)
        return [found async for found in store.checkpoints.of_run(RUN)] != []

    assert await housekeeping(now)
    for ahead in (3 * 3600, 3650 * DAY):
        assert not await housekeeping(now + ahead)
        assert not await housekeeping(now + ahead + 60)
        assert path.exists()
        assert await housekeeping(now + 60), "it is back"
    assert not await housekeeping(now + 7300)
    assert not await housekeeping(now + 7300 + DAY - 60)
    assert path.exists()
    assert not await housekeeping(now + 7300 + DAY)
    assert not path.exists()


@on_sqlite
async def test_what_is_acknowledged_is_synced_and_the_rest_waits_for_no_disk(store):
    """SQLite syncs its log at a commit that is FULL."""
    levels = []

    @event.listens_for(store.database._engine, "commit")
    def note(connection) -> None:
        levels.append(connection.exec_driver_sql("PRAGMA synchronous").scalar())

    async def levels_of(write) -> set[int]:
        levels.clear()
        await write
        return {*levels}

    row = {"at": 1.0, "actor": "a", "action": "b", "status": 200}
    normal, full = {1}, {2}
    assert await levels_of(store.database.write(insert(audit), row)) == normal
    whole(store, STATE)
    saved = checkpoint(store, STATE)
    assert await levels_of(store.checkpoints.put(saved)) == full
    assert await levels_of(store.checkpoints.set_ttl(saved, None)) == full
    assert await levels_of(store.checkpoints.delete(saved)) == full
    keys = KeyStore(database=store.database)
    assert await levels_of(keys.create(NewKey(owner="ann", role="member"))) == full
    assert await levels_of(keys.revoke(keys.all()[0].id)) == full
    assert await levels_of(store.database.write(insert(audit), row)) == normal


async def test_another_database_removes_nothing(tmp_path):
    store = Store(tmp_path)
    await store.database.open()
    whole(store, STATE)
    await store.checkpoints.put(checkpoint(store, STATE))
    version = whole(store, "weights/s-1_train_0/v000001-11111111")
    await store.database.close()
    lose_database(tmp_path)

    for _ in range(2):
        store = Store(tmp_path)
        await store.database.open()
        await store.collector.collect_all()
        await store.collector.empty_trash()
        assert (tmp_path / STATE / "file").exists()
        assert (version / "file").exists()
        assert store.collector.unknown == {"checkpoints/s-1_train_0", "weights/s-1_train_0"}
        await store.collector.close()
        await store.database.close()
