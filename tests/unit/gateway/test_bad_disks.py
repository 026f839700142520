"""The gateway's files on NFS and on disks that fill up, fail and lose power."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pyrage
import pytest

from gateway.checkpoints.copies import CheckpointCopier, CopyRequest
from gateway.checkpoints.encryption import seal_version
from gateway.checkpoints.versions import VersionStore
from gateway.owners.auth.identity import Readers
from gateway.runs.recovery.replay_log import Snapshot
from gateway.runs.recovery.snapshots import SnapshotStore
from gateway.storage.data_directory import keep_signing_key
from tandem.errors import CheckpointDamaged, InvalidRequest, StorageFailed, StorageFull
from tandem.weights import Manifest, PartialVersion, checksum_file, open_version
from tandem.weights.store import fsync_path, make_folder, write_synced
from tests.support.gateway.checkpoint_store import PATH, RUN, Store, checkpoint, whole
from tests.support.unreliable_disk import Fault, UnreliableDisk

STATE = "checkpoints/s-1_train_0/a-11111111"
FAILING = pytest.mark.parametrize("fault", [Fault.FULL, Fault.LOST])


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "data").mkdir()
    with UnreliableDisk(tmp_path / "data") as disk:
        yield disk


@pytest.fixture
async def store(disk, tmp_path):
    store = Store(tmp_path / "data")
    await store.database.open()
    yield store
    await store.database.close()


@pytest.fixture
async def saved(store) -> Path:
    """A saved checkpoint, synced to the disk."""
    folder = whole(store, STATE)
    for path in (*folder.iterdir(), folder, *folder.parents[:3]):
        fsync_path(path)
    await store.checkpoints.put(checkpoint(store, STATE, public=True))
    return folder


def folders(store, *roots: str) -> set[str]:
    """All folders that may hold a checkpoint, also partial ones, except the trash."""
    found = {path for root in roots for path in store.data_dir.glob(f"{root}/[!.]*/*")}
    return {str(path.relative_to(store.data_dir)) for path in found if path.is_dir()}


async def is_whole(store, path: str) -> bool:
    async with store.reading(path) as found:
        files = await store.versions.files(found)
        return files["file"].read_text() == "content"


# --- Copies ----------------------------------------------------------------------------------


def copier(store) -> CheckpointCopier:
    return CheckpointCopier(
        database=store.database,
        data_dir=store.data_dir,
        checkpoints=store.checkpoints,
        versions=store.versions,
    )


def request(key: str) -> CopyRequest:
    return CopyRequest(
        source=PATH,
        readers=Readers(()),
        owner="local",
        project_id="",
        run_id=None,
        ttl_seconds=None,
        idempotency_key=key,
    )


@FAILING
async def test_a_copy_that_the_disk_does_not_take_leaves_nothing_and_can_be_made_again(
    store, disk, saved, fault
):
    copies = copier(store)
    for nth, strike in enumerate(disk.strikes(fault)):
        before = folders(store, "checkpoints")
        try:
            with strike:
                await copies.copy(request(str(nth)))
        except StorageFailed as error:
            assert isinstance(error, StorageFull) == (fault is Fault.FULL), strike.hit
            assert "try again" in error.message
        for run_id in store.checkpoints.take_marked():
            await store.collector.collect(run_id, ended=True)
        if strike.hit:
            assert folders(store, "checkpoints") == before, strike.hit
        path = await copies.copy(request(str(nth)))
        disk.lose_power()
        assert await is_whole(store, path) and await is_whole(store, PATH), strike.hit


async def test_a_copy_in_which_the_gateway_was_killed_is_not_left_in_parts(store, disk, saved):
    for nth, strike in enumerate(disk.strikes(Fault.KILL)):
        copies = copier(store)
        with strike:
            await copies.copy(request(str(nth)))
        next_one = Store(store.data_dir)
        await next_one.database.open()
        await next_one.collector.collect_all()
        for left in next_one.collector.unknown:  # a whole copy, reported to nobody
            (file,) = (store.data_dir / left).rglob("file")
            assert file.read_text() == "content", strike.hit
        path = await copier(next_one).copy(request(str(nth)))
        disk.lose_power()
        assert await is_whole(next_one, path) and await is_whole(next_one, PATH), strike.hit
        assert list(store.data_dir.glob("checkpoints/*/.partial-*")) == []
        await next_one.database.close()


async def test_a_copy_that_the_database_does_not_take_is_removed(store, saved, monkeypatch):
    async def refuse(*_statements: object, durable: bool) -> None:
        raise StorageFailed("no")

    with monkeypatch.context() as broken:
        broken.setattr(store.database, "write_together", refuse)
        with pytest.raises(StorageFailed):
            await copier(store).copy(request("k"))
    (run_id,) = set(store.checkpoints.take_marked()) - {RUN}
    await store.collector.collect(run_id, ended=True)
    assert folders(store, "checkpoints") == {STATE}


async def test_a_copy_into_the_place_of_another_sources_copy_is_refused(store, saved):
    other = "checkpoints/s-1_train_1/a-22222222"
    whole(store, other)
    path = "tinker://s-1:train:1/weights/a"
    await store.checkpoints.put(checkpoint(store, other, path=path, public=True))
    first = replace(request("k"), run_id="s-2:train:0")
    copy = await copier(store).copy(first)
    assert await copier(store).copy(first) == copy
    with pytest.raises(InvalidRequest, match="there is a training run s-2:train:0 already"):
        await copier(store).copy(replace(first, source=path))


# --- Names -----------------------------------------------------------------------------------


async def test_a_checkpoint_that_the_database_does_not_take_is_told_and_removed(
    store, saved, monkeypatch
):
    async def refuse(*_statements: object, durable: bool) -> None:
        raise StorageFailed("no")

    other = f"{STATE}-other"
    whole(store, other)
    with monkeypatch.context() as broken:
        broken.setattr(store.database, "write_together", refuse)
        with pytest.raises(StorageFailed), store.checkpoints.writing(other, run_id=RUN):
            await store.checkpoints.put(checkpoint(store, other, path=f"tinker://{RUN}/weights/b"))
    await store.collector.collect(RUN)
    assert folders(store, "checkpoints") == {STATE}


@FAILING
def test_a_secret_that_could_not_be_kept_leaves_no_file(disk, tmp_path, fault):
    data = tmp_path / "data"
    for strike in disk.strikes(fault):
        try:
            with strike:
                key = keep_signing_key(data)
        except OSError:
            assert {file.name for file in data.iterdir()} <= {"signing_key"}, strike.hit
        key = keep_signing_key(data)
        assert keep_signing_key(data) == key
        (data / "signing_key").unlink()


# --- The collector ---------------------------------------------------------------------------


async def test_what_cannot_be_put_away_holds_nothing_up_and_is_tried_again(store, disk, saved):
    others = [f"checkpoints/s-1_train_0/{name}-22222222" for name in ("b", "c", "d")]
    for strike in disk.strikes(Fault.FULL):
        for other in others:
            make_folder(store.data_dir / other)
        store.checkpoints.given_up[RUN].update(others)  # else nothing would remove them
        with strike:
            done = await store.collector.collect(RUN)
        assert done != bool(strike.hit)
        assert len(folders(store, "checkpoints") & {*others}) == bool(strike.hit), strike.hit
        assert await store.collector.collect(RUN)
        assert not folders(store, "checkpoints") & {*others}


# --- Snapshots -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    name: str = "tiny"


@dataclass(frozen=True)
class Run:
    id: str = RUN
    owner: str = "local"
    model: Model = Model()


def snapshots_of(store) -> SnapshotStore:
    return SnapshotStore(
        database=store.database,
        data_dir=store.data_dir,
        checkpoints=store.checkpoints,
        versions=store.versions,
    )


@pytest.mark.parametrize("fault", [Fault.FULL, Fault.LOST])
async def test_a_snapshot_that_becomes_a_checkpoint_is_one_also_after_a_power_failure(
    store, disk, fault
):
    snapshots = snapshots_of(store)
    for nth, strike in enumerate(disk.strikes(fault)):
        folder = whole(store, f"snapshots/s-1_train_0/{nth:08d}-11111111")
        for path in (*folder.iterdir(), folder, *folder.parents[:3]):
            fsync_path(path)
        snapshot = Snapshot(folder=str(folder), seq_id=nth, step=nth, bytes=7)
        with strike:
            kept = await snapshots.keep(Run(), snapshot)
        assert (kept is None) == bool(strike.hit), strike.hit
        disk.lose_power()
        if kept is not None:
            assert await is_whole(store, str(kept))


async def test_the_end_of_a_run_does_not_wait_for_a_disk_that_hangs(store, monkeypatch):
    kept = snapshots_of(store)
    folder = whole(store, "snapshots/s-1_train_0/00000001-11111111")
    answers = threading.Event()
    monkeypatch.setattr("gateway.runs.recovery.snapshots.KEEPING_PATIENCE", 0.01)
    monkeypatch.setattr(
        "gateway.runs.recovery.snapshots.give_name", lambda source, target: answers.wait()
    )
    snapshot = Snapshot(folder=str(folder), seq_id=1, step=1, bytes=7)
    try:
        assert await kept.keep(Run(), snapshot) is None
    finally:
        answers.set()


async def failing_put(store, monkeypatch, *, times: int) -> list[str]:
    """Let the database refuse the next rows of checkpoints. Returns the tries."""
    put, tries = store.checkpoints.put, []

    async def refuse(checkpoint) -> None:
        tries.append(checkpoint.folder)
        if len(tries) <= times:
            raise StorageFailed("the database is away")
        await put(checkpoint)

    monkeypatch.setattr("gateway.runs.recovery.snapshots.REPEAT_AFTER", 0)
    monkeypatch.setattr(store.checkpoints, "put", refuse)
    return tries


async def test_a_snapshot_is_kept_after_a_short_outage_of_the_database(store, monkeypatch):
    tries = await failing_put(store, monkeypatch, times=2)
    find, failures = store.checkpoints.find, iter([StorageFailed("the database is away")])

    async def find_later(path):
        if failure := next(failures, None):
            raise failure
        return await find(path)

    monkeypatch.setattr(store.checkpoints, "find", find_later)
    folder = whole(store, "snapshots/s-1_train_0/00000001-11111111")
    kept = await snapshots_of(store).keep(Run(), Snapshot(folder=str(folder), step=1, bytes=7))
    assert str(kept) == f"tinker://{RUN}/weights/recovered-1"
    assert await is_whole(store, str(kept))
    assert len(tries) == 3 and len(set(tries)) == 1


async def test_a_snapshot_without_a_row_is_moved_back(store, monkeypatch):
    await failing_put(store, monkeypatch, times=1)
    snapshots = snapshots_of(store)
    folder = whole(store, "snapshots/s-1_train_0/00000001-11111111")
    snapshot = Snapshot(folder=str(folder), step=1, bytes=7)
    snapshots.record_snapshot(Run(), snapshot)
    assert await snapshots.keep(Run(), snapshot, patience=0) is None
    await store.database.flush()
    assert (folder / "file").read_text() == "content"
    assert folders(store, "checkpoints") == set()
    kept = await snapshots.keep(Run(), snapshot)
    assert await is_whole(store, str(kept))


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_keeping_leaves_the_snapshot_whole_in_one_place(
    store, monkeypatch, fails
):
    put, begun, go_on = store.checkpoints.put, asyncio.Event(), asyncio.Event()

    async def put_slowly(checkpoint) -> None:
        begun.set()
        await go_on.wait()
        if fails:
            raise StorageFailed("the database is away")
        await put(checkpoint)

    monkeypatch.setattr(store.checkpoints, "put", put_slowly)
    snapshots = snapshots_of(store)
    folder = whole(store, "snapshots/s-1_train_0/00000001-11111111")
    snapshot = Snapshot(folder=str(folder), step=1, bytes=7)
    snapshots.record_snapshot(Run(), snapshot)
    keeping = asyncio.create_task(snapshots.keep(Run(), snapshot))
    await begun.wait()
    keeping.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    await store.database.flush()
    if fails:
        assert (folder / "file").read_text() == "content"
        assert len((await snapshots.of_runs([RUN]))[RUN]) == 1
    else:
        assert await is_whole(store, f"tinker://{RUN}/weights/recovered-1")
        assert not await snapshots.of_runs([RUN])


# --- Encrypted versions ----------------------------------------------------------------------


@FAILING
def test_an_encrypted_version_is_whole_or_absent_wherever_its_disk_fails(disk, tmp_path, fault):
    versions = tmp_path / "data" / "weights" / "run"
    plain = PartialVersion(versions / "v1")
    plain.create()
    write_synced(plain.path / "file", b"content" * 10_000)
    manifest = Manifest(
        version="run/v1",
        run_id="run",
        step=1,
        dtype="float32",
        tensors=1,
        created="2026-01-01T00:00:00Z",
        files=[checksum_file(plain.path / "file")],
    )
    plain.commit(manifest)
    identity = pyrage.x25519.Identity.generate()
    for nth, strike in enumerate(disk.strikes(fault), start=2):
        sealed = versions / f"v{nth}"
        failed = False
        with strike:
            try:
                seal_version(
                    plain.final, sealed, name=f"run/v{nth}", recipients=[identity.to_public()]
                )
            except (OSError, pyrage.EncryptError):
                PartialVersion(sealed).discard()
                failed = True
        assert failed == bool(strike.hit), strike.hit
        disk.lose_power()
        assert sealed.exists() != failed, strike.hit
    open_version(sealed)
    content = pyrage.decrypt((sealed / "file.age").read_bytes(), [identity])
    assert content == b"content" * 10_000


# --- Reading on another host -----------------------------------------------------------------


async def test_a_checkpoint_is_read_by_a_gateway_whose_host_looked_too_early(store, disk):
    with disk.at("standby"):
        assert not (store.data_dir / STATE).exists()
        with pytest.raises(CheckpointDamaged):
            await store.versions.files(checkpoint(store, STATE))
    whole(store, STATE)
    await store.checkpoints.put(checkpoint(store, STATE))
    with disk.at("standby"):
        assert not (store.data_dir / STATE).exists()
        assert await is_whole(store, PATH)


async def test_a_checkpoint_is_read_although_open_files_get_stale(store, disk, saved):
    for strike in disk.strikes(Fault.STALE):
        with strike:
            await store.versions.files(checkpoint(store, STATE))


async def test_a_full_disk_is_named_with_its_free_and_needed_bytes_alone(store):
    versions = VersionStore(database=store.database, data_dir=store.data_dir, min_free_bytes=2**62)
    with pytest.raises(StorageFull, match=r"no room to take on work: \d+ bytes.*are kept free$"):
        await versions.check_space(expected_bytes=0, what="take on work")
