"""What is on the disk and unknown to the database, and what has expired: nothing that a user was
told is saved is removed for it."""

from __future__ import annotations

import os
import time

import pytest
from sqlalchemy import delete, event, insert
from structlog.testing import capture_logs

from gateway.auth.keys import KeyStore, NewKey
from gateway.checkpoints.versions import files_of
from gateway.storage.pairing import check_pair
from gateway.storage.tables import audit, checkpoints
from tandem.errors import CheckpointDamaged
from tests.support.gateway.checkpoint_store import (
    DAY,
    PATH,
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
    assert await check_pair(store.database, tmp_path)
    yield store
    await store.database.close()


async def forget(store) -> None:
    """What an older copy of the database does: it does not know the checkpoints."""
    await store.database.write(delete(checkpoints))


async def test_a_complete_checkpoint_that_the_database_does_not_know_is_kept_with_a_warning(store):
    whole(store, STATE)
    await store.checkpoints.put(checkpoint(store, STATE))
    folder(store, "checkpoints/s-1_train_0/b-22222222")  # what a crash left of a save
    whole(store, "checkpoints/s-1_train_0/.partial-c-33333333")
    await forget(store)
    with capture_logs() as lines:
        await store.collector.collect_all()
    assert store.quarantine.folders() == [STATE]
    (warning,) = [line for line in lines if line["log_level"] == "warning"]
    assert warning["folders"] == [STATE]
    assert "tandem checkpoints adopt" in warning["hint"]
    assert "tandem checkpoints adopt" in (await store.collector.warnings())[0]
    assert not (store.data_dir / "checkpoints/s-1_train_0").exists()

    done = await store.adopter.adopt()
    assert (done.adopted, done.refused) == ([PATH], {})
    await store.collector.collect_all()
    async with store.reading(PATH) as found:
        assert (store.data_dir / found.relative_folder / "file").read_text() == "content"
        assert (found.owner, found.expires_at, found.public) == ("local", None, False)
    names = {file.name for file in (store.data_dir / STATE).iterdir()}
    assert names == {"checkpoint.json", "file", "tandem.json"}
    assert await store.collector.warnings() == []


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
async def test_what_its_user_gave_up_goes_at_once_and_not_into_quarantine(store, end):
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
    await store.collector.collect_all()  # as after a crash between the name's end and the files'
    assert not path.exists()
    assert store.quarantine.folders() == []


async def test_adopting_says_what_it_does_not_take_back_and_leaves_it(store):
    nameless = "checkpoints/s-1_train_0/b-22222222"
    whole(store, nameless)
    older, newer = "checkpoints/s-1_train_0/a-33333333", STATE
    for relative, created_at in ((older, 1.0), (newer, 2.0)):
        whole(store, relative)
        await store.checkpoints.put(checkpoint(store, relative, created_at=created_at))
        await forget(store)
    cut = "checkpoints/s-1_train_0/c-44444444"
    (whole(store, cut) / "file").write_text("con")
    cut_path = f"tinker://{RUN}/weights/c"
    await store.checkpoints.put(checkpoint(store, cut, path=cut_path))
    await forget(store)
    moved = "checkpoints/s-2_train_0/a-55555555"
    (whole(store, moved) / "tandem.json").write_bytes(
        (store.data_dir / newer / "tandem.json").read_bytes()
    )
    done = await store.adopter.adopt()
    assert done.adopted == [PATH]
    assert "does not say" in done.refused.pop(nameless)
    assert f"another checkpoint {PATH}" in done.refused.pop(older)
    assert "3 bytes, not 7" in done.refused.pop(cut)
    assert "cannot be in this folder" in done.refused.pop(moved)
    assert done.refused == {}
    await store.collector.collect_all()
    assert set(store.quarantine.folders()) == {nameless, older, cut, moved}
    assert (await store.adopter.adopt()).adopted == []


async def test_a_quarantine_ends_after_its_time_and_not_when_the_clock_jumps(store):
    whole(store, STATE)
    await store.collector.collect_all()
    since = store.data_dir / "quarantine" / STATE / ".quarantined"
    seen = since.with_name(".overdue")
    now = time.time()

    def age(mark, days) -> None:
        os.utime(mark, (now - days * DAY, now - days * DAY))

    await store.collector.expire_quarantine()
    age(since, 31)  # or the clock is 31 days ahead
    await store.collector.expire_quarantine()
    assert store.quarantine.folders() == [STATE]
    age(since, 1)  # the clock was set back
    await store.collector.expire_quarantine()
    assert not seen.exists()
    age(since, 31)
    await store.collector.expire_quarantine()
    age(seen, 1.5)
    with capture_logs() as lines:
        await store.collector.expire_quarantine()
    assert store.quarantine.folders() == []
    assert (lines[0]["event"], lines[0]["folder"]) == ("quarantine_ended", STATE)


async def test_a_clock_that_is_ahead_hides_a_checkpoint_and_loses_nothing(store, monkeypatch):
    path, now = whole(store, STATE), time.time()
    await store.checkpoints.put(checkpoint(store, STATE, expires_at=now + 7200))

    async def housekeeping(clock: float) -> bool:
        """A round at this time; whether the checkpoint can be used then."""
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


async def test_a_foreign_database_removes_nothing_until_an_operator_says_so(tmp_path):
    store = Store(tmp_path)
    await store.database.open()
    assert await check_pair(store.database, tmp_path)
    whole(store, STATE)
    left = [folder(store, "checkpoints/s-1_train_0/b-2"), folder(store, "weights/.trash/c")]
    await store.checkpoints.put(checkpoint(store, STATE))
    await store.database.close()
    lose_database(tmp_path)

    for _ in range(2):  # it is still foreign at the second start
        store = Store(tmp_path)
        await store.database.open()
        store.collector.paired = await check_pair(store.database, tmp_path)
        assert not store.collector.paired
        await store.collector.collect_all()
        await store.collector.empty_trash()
        assert (tmp_path / STATE).exists()
        assert all(path.exists() for path in left)
        assert "tandem checkpoints adopt" in (await store.collector.warnings())[0]
        await store.database.close()

    store = Store(tmp_path)
    await store.database.open()
    store.collector.paired = await check_pair(store.database, tmp_path)
    assert (await store.adopter.adopt()).adopted == [PATH]
    assert await check_pair(store.database, tmp_path)
    await store.collector.collect_all()
    await store.collector.empty_trash()
    assert (tmp_path / STATE).exists()
    assert not any(path.exists() for path in left)
    await store.database.close()


async def test_a_directory_without_files_belongs_to_any_database(tmp_path):
    for _ in range(2):
        store = Store(tmp_path)
        await store.database.open()
        assert await check_pair(store.database, tmp_path)
        await store.database.close()
        lose_database(tmp_path)
