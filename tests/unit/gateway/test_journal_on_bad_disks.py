"""Files of the journal and of results on full, failing and powerless disks."""

from __future__ import annotations

import asyncio
import errno
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest
from sqlalchemy import create_engine, delete

from gateway.identifiers import operation_blob, result_blob
from gateway.metrics import Metrics
from gateway.runs.journal import INLINE_PAYLOAD_BYTES, Journal
from gateway.runs.operations import Operation
from gateway.storage.data_directory import write_file
from gateway.storage.database import Database
from gateway.storage.futures.table import Future, FutureTable, Result
from gateway.storage.log_sync import LogSync
from gateway.storage.tables import operations
from tandem.errors import StorageFailed
from tests.support.unreliable_disk import Fault, UnreliableDisk
from tests.support.waiting import PATIENCE

RUN = "s-1:train:0"
BATCH = b"batch" * INLINE_PAYLOAD_BYTES
RESULT = Result(media="protobuf", body=b"result" * INLINE_PAYLOAD_BYTES)
FAULTS = pytest.mark.parametrize("fault", [Fault.FULL, Fault.LOST])


@pytest.fixture
def disk(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.storage.database._RETRY_AFTER", 0.01)
    (tmp_path / "data").mkdir()
    with UnreliableDisk(tmp_path / "data") as disk:
        yield disk


@pytest.fixture
def data(tmp_path) -> Path:
    return tmp_path / "data"


@pytest.fixture
async def database(disk, data):
    database = Database(url="", data_dir=data)
    await database.open()
    yield database
    await database.close()


def futures(data: Path, *, max_bytes: int = 2**20) -> FutureTable:
    return FutureTable(
        folder=data / "samples",
        result_ttl=60,
        bytes_in_memory=max_bytes,
        max_samples=9,
        metrics=Metrics(),
    )


@pytest.fixture
def journal(database, data) -> Journal:
    return Journal(
        database=database,
        data_dir=data,
        futures=futures(data),
        metrics=Metrics(),
        result_ttl=60,
    )


async def wait_until_written(database: Database) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await database.flush():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def operation(seq_id: int) -> Operation:
    future = Future(
        request_id=f"{RUN}:{seq_id}", source="operation", describe=lambda: None, owner="ann"
    )
    return Operation(
        run_id=RUN,
        seq_id=seq_id,
        kind="forward_backward",
        future=future,
        has_payload=True,
        size=len(BATCH),
    )


async def accept(journal: Journal, seq_id: int) -> bool:
    """Return whether the operation was accepted and its client told."""
    try:
        await journal.accept(operation(seq_id), payload=BATCH)
        await journal.database.sync()
    except StorageFailed:
        return False
    return True


@FAULTS
async def test_an_operation_of_which_its_client_is_told_survives_a_power_failure(
    journal, database, disk, data, fault
):
    for nth, strike in enumerate(disk.strikes(fault)):
        await journal.remove_payloads(RUN)
        await database.write(delete(operations))
        with strike:
            told = await accept(journal, nth)
        assert told != bool(strike.hit), strike.hit
        is_row = await journal.has(run_id=RUN, seq_id=nth, digest=b"")
        assert operation_blob(data, run_id=RUN, seq_id=nth).exists() == is_row, strike.hit
        if is_row:  # it was accepted, and the client sends it again
            await database.sync()
        else:
            assert await accept(journal, nth)
        disk.lose_power()
        assert await journal.read_payload(RUN, nth) == BATCH, strike.hit


async def test_a_log_of_the_database_that_could_not_be_synced_is_written_into_the_database(
    journal, database, disk, data, tmp_path
):
    for nth, strike in enumerate(disk.strikes(Fault.LOST)):
        await journal.accept(operation(nth), payload=b"small")
        with strike:
            try:
                await database.sync()
            except StorageFailed:
                assert strike.hit == "sync /tandem.db-wal"
        if strike.hit:
            await database.sync()
            shutil.copyfile(data / "tandem.db", tmp_path / "alone.db")
            with sqlite3.connect(tmp_path / "alone.db") as alone:
                found = alone.execute("SELECT seq_id FROM operations").fetchall()
            assert found == [(nth,)]


@FAULTS
async def test_a_result_that_is_recorded_survives_a_power_failure(
    journal, database, disk, data, fault
):
    for nth, strike in enumerate(disk.strikes(fault)):
        await journal.accept(done := operation(nth), payload=b"")
        with strike:
            journal.end(done, RESULT)
            await database.flush()
        await wait_until_written(database)
        disk.lose_power()
        recalled = await journal.recall(f"{RUN}:{nth}")
        assert recalled.file.read_bytes() == RESULT.body, strike.hit
        assert list(recalled.file.parent.glob(".*")) == []
        await database.write(delete(operations))
        shutil.rmtree(data / "results")


async def test_a_flush_does_not_tell_of_what_is_tried_again_in_this_moment(database, monkeypatch):
    monkeypatch.setattr("gateway.storage.database._RETRY_AFTER", 1e6)
    full, busy, over = iter([True]), threading.Event(), threading.Event()

    def fail_once() -> None:
        if next(full, False):
            raise OSError(errno.ENOSPC, "no space")

    def keep_the_writer() -> None:
        busy.set()
        assert over.wait(PATIENCE)

    database.write_soon(delete(operations), before=fail_once)
    assert not await database.flush()
    database.write_soon(delete(operations), before=lambda: None)  # waits behind the first
    working = asyncio.create_task(database.write(delete(operations), before=keep_the_writer))
    flushed = asyncio.create_task(database.flush())
    assert await asyncio.to_thread(busy.wait, PATIENCE)
    database._try_again()
    over.set()
    await working
    assert not await flushed
    assert await database.flush()


@FAULTS
async def test_a_sample_that_does_not_fit_on_the_disk_stays_in_memory(disk, data, fault):
    table = futures(data, max_bytes=1)
    for nth, strike in enumerate(disk.strikes(fault)):
        sample = Future(request_id=f"s-1:{nth}", source="sample", describe=lambda: None)
        table.add(sample)
        with strike:
            sample.resolve(RESULT)
            await asyncio.sleep(0)
            await asyncio.gather(*table._file_work)
        outcome = sample.outcome
        content = outcome.body if strike.hit else outcome.file.read_bytes()
        assert content == RESULT.body, strike.hit
        assert bool(list((data / "samples").rglob("*/*"))) != bool(strike.hit), strike.hit
        await table.close()


def test_a_file_that_is_read_while_it_is_written_anew_is_one_or_the_other(disk, data):
    file = result_blob(data, request_id=f"{RUN}:1")
    write_file(file, b"one")
    for strike in disk.strikes(Fault.KILL):
        with strike:
            write_file(file, b"other", synced=True)
        assert file.read_bytes() in (b"one", b"other"), strike.hit


async def test_a_sync_after_the_end_raises_and_does_not_wait():
    log = LogSync(create_engine("sqlite://"))
    log.shutdown()
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(log.sync(), 60)


async def test_callers_during_a_sync_share_the_next_one(monkeypatch):
    log = LogSync(create_engine("sqlite://"))
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)
    syncs = []

    def sync_file() -> None:
        syncs.append(None)
        begun.release()
        go_on.acquire()

    monkeypatch.setattr(log, "_sync_file", sync_file)
    first = asyncio.create_task(log.sync())
    await asyncio.to_thread(begun.acquire)
    later = [asyncio.create_task(log.sync()) for _ in range(5)]
    await asyncio.sleep(0)
    later[0].cancel()
    go_on.release(2)
    await first
    await asyncio.gather(*later, return_exceptions=True)
    assert len(syncs) == 2
    assert [task.cancelled() for task in later] == [True, False, False, False, False]
    log.shutdown()


async def test_a_failed_sync_fails_all_that_waited_for_it_and_no_later_caller(monkeypatch):
    log, full = LogSync(create_engine("sqlite://")), iter([True])

    def sync_file() -> None:
        if next(full, False):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(log, "_sync_file", sync_file)
    waiting = [asyncio.create_task(log.sync()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError, StorageFailed, StorageFailed]
    await log.sync()
    log.shutdown()
