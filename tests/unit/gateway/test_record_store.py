"""The store of metrics and rollouts, with a database and files."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
from sqlalchemy import insert, select, update

from gateway.metrics import Metrics
from gateway.runs.record import identity_files
from gateway.runs.record import rollouts as rollouts_module
from gateway.runs.record import store as store_module
from gateway.runs.record.files import Place, record_folder
from gateway.runs.record.lineage import ancestors_of, note_parent
from gateway.runs.record.metrics import MetricsRow
from gateway.runs.record.reader import read_index
from gateway.runs.record.rollouts import RolloutBatch
from gateway.runs.record.store import RecordStore
from gateway.storage.database import from_row
from gateway.storage.tables import rollout_batches, run_records, runs
from tandem.errors import StorageFailed, StorageFull, UnknownRun
from tests.support.gateway.checkpoint_store import RUN, Store
from tests.support.unreliable_disk import Fault, UnreliableDisk
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("each_database")


@pytest.fixture
async def world(tmp_path):
    root = tmp_path / "data"
    (root / "runs").mkdir(parents=True)
    world = Store(root, url="")
    await world.database.open()
    await add_run(world, RUN)
    yield world
    await world.database.close()


@pytest.fixture
async def record(world):
    record = record_of(world)
    yield record
    await record.close()


def record_of(world, epoch=1, **options):
    return RecordStore(
        metrics=Metrics(),
        database=world.database,
        data_dir=world.data_dir,
        checkpoints=world.checkpoints,
        epoch=epoch,
        retry=0.0,
        **options,
    )


async def add_run(world, run_id, **values):
    row = {"id": run_id, "session_id": "s-1", "base_model": "tiny", "training": {}}
    row |= {"owner": "ann", "state": "active", "created_at": 1.0} | values
    await world.database.write(insert(runs).values(**row))


def row(step, **values):
    return MetricsRow(step, values, 1.0)


async def index_of(record):
    return (await record.summaries([RUN]))[RUN]


async def points(record, name, run_id=RUN):
    found = (await record.curves(run_id, [name], 1000)).get(name)
    return dict(zip(found.step.tolist(), found.value.tolist(), strict=True)) if found else {}


async def test_the_index_counts_rows_bytes_and_the_newest_values(record):
    await record.append_metrics(RUN, [row(1, a=1, b=math.nan), row(2, a=2)], "user")
    await record.append_rollouts(RUN, "x", 2, [{"answer": "a"}])
    index = await index_of(record)
    assert (index.rows, index.rollouts, index.step, index.dropped) == (2, 1, 2, 0)
    assert index.last == {"a": 2.0, "b": "NaN"}
    folder = record_folder(record.data_dir, RUN)
    size = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
    assert index.bytes == size + 200  # for the row of the batch


async def test_a_run_that_does_not_exist_is_unknown(record):
    with pytest.raises(UnknownRun):
        await record.append_metrics("s-2:train:0", [row(1, a=1)], "user")
    with pytest.raises(UnknownRun):
        await record.owner_of("s-2:train:0")


async def test_a_record_beyond_its_bytes_drops_and_counts_the_users_rows_only(world):
    record = record_of(world, most_bytes=100)
    await record.append_metrics(RUN, [row(1, a=1), row(2, a=1)], "user")
    told = await record.append_metrics(RUN, [row(3, a=1)], "user")
    assert (told.written, told.dropped) == (0, 1) and "100 bytes" in told.why
    told = await record.append_rollouts(RUN, "x", 3, [{"answer": "a"}])
    assert (told.written, told.dropped) == (0, 1)
    record.note_step(RUN, 3, {"loss": 0.5})
    await record.close()
    assert await points(record_of(world, 2), "tandem/loss") == {3: 0.5}
    assert (await index_of(record)).dropped == 2


async def test_a_batch_of_which_nothing_is_kept_has_no_row_and_may_come_again(world):
    full = record_of(world, most_bytes=0)
    for rollouts in ([], [{"answer": "a"}]):
        told = await full.append_rollouts(RUN, "x", 3, rollouts)
        assert (told.written, told.dropped) == (0, len(rollouts))
    assert await world.database.read(select(rollout_batches)) == []
    await full.close()
    record = record_of(world, epoch=2)
    assert (await record.append_rollouts(RUN, "x", 3, [{"answer": "a"}])).written == 1
    assert (await record.append_rollouts(RUN, "y", 3, [{"answer": 2**64}])).written == 0
    assert len(await world.database.read(select(rollout_batches))) == 1
    await record.close()


async def test_an_owner_beyond_the_quota_gets_no_more_rows(record, world, monkeypatch):
    monkeypatch.setitem(world.checkpoints.limits._limits, "checkpoint_bytes", 10)
    await record.append_metrics(RUN, [row(1, a=1)], "user")
    told = await record.append_metrics(RUN, [row(2, a=1)], "user")
    assert told.dropped == 1 and "limit of checkpoint bytes" in told.why


async def test_a_run_has_at_most_a_thousand_names(record):
    rows = [row(step, **{f"n{step}-{number}": 1 for number in range(200)}) for step in range(6)]
    told = await record.append_metrics(RUN, rows, "user")
    assert (told.written, told.dropped) == (5, 1) and "1000 at most" in told.why
    assert (await record.append_metrics(RUN, [row(9, **{"n0-0": 2})], "user")).written == 1


async def test_the_next_gateway_goes_on_with_the_index_and_new_files(record, world):
    await record.append_metrics(RUN, [row(1, a=1)], "user")
    await record.append_rollouts(RUN, "x", 1, [{"answer": "a"}])
    later = record_of(world, epoch=2)
    await later.append_metrics(RUN, [row(1, a=2), row(2, a=3)], "user")
    told = await later.append_rollouts(RUN, "x", 1, [{"answer": "a"}])
    assert (told.written, (await later.rollouts(RUN, None)).total_count) == (1, 1)
    assert await points(later, "a") == {1: 2, 2: 3}
    assert ((await index_of(later)).rows, (await index_of(later)).rollouts) == (3, 1)
    await later.close()


async def test_a_repeated_batch_changes_nothing(record):
    for _ in range(2):
        told = await record.append_rollouts(RUN, "x", 1, [{"answer": "a"}, {"answer": "b"}])
        assert (told.written, told.dropped) == (2, 0)
    assert (await record.rollouts(RUN, 1)).total_count == 2


async def test_a_batch_that_was_written_without_its_row_is_written_again_and_read_once(
    record, world
):
    await record.append_rollouts(RUN, "x", 1, [{"answer": "a"}])
    await world.database.write(rollout_batches.delete())  # as after a kill between the two
    later = record_of(world, epoch=2)
    await later.append_rollouts(RUN, "x", 1, [{"answer": "a"}])
    page = await later.rollouts(RUN, 1)
    assert [one["answer"] for one in page.rollouts] == ["a"] and page.total_count == 1
    await later.close()


async def test_a_repeated_batch_replaces_its_earlier_copy_in_the_index_of_the_files(
    record, world, monkeypatch
):
    many = [{"answer": "a", "reward": 1}, {"answer": "b", "reward": 0}]

    async def fail(*_):
        raise StorageFailed("no connection")

    with monkeypatch.context() as outage:
        outage.setattr(world.database, "write", fail)
        with pytest.raises(StorageFailed):
            await record.append_rollouts(RUN, "x", 1, many)
    folder = record_folder(world.data_dir, RUN)
    (first,) = folder.glob("rollouts-*.jsonl")
    await record.append_rollouts(RUN, "x", 1, many)
    await _check_files(record)
    with first.with_name("rollouts-1-1.jsonl").open("ab") as second:
        second.truncate(second.tell() - 5)  # torn
    await world.database.write(rollout_batches.delete())
    later = record_of(world, epoch=2)
    await later.append_rollouts(RUN, "x", 1, many)
    await _check_files(later)
    await later.close()


async def _check_files(record):
    (row,) = await record.database.read(select(rollout_batches))
    assert read_index(record_folder(record.data_dir, RUN), RUN)[1] == [from_row(RolloutBatch, row)]
    assert row["count"] == 2


async def test_a_disk_that_hangs_is_an_error_to_repeat(record, monkeypatch):
    go_on = threading.Event()
    async with record._writing(RUN) as writing:
        monkeypatch.setattr(store_module, "_WRITE", 0.0)
        with pytest.raises(StorageFailed):
            await record._in_thread(go_on.wait)
        go_on.set()
        with pytest.raises(StorageFailed):
            await record.append_metrics(RUN, [row(1, a=1)], "user")
    assert not writing.lock.locked()


async def test_a_run_that_cannot_be_written_loses_no_rows_of_other_runs_at_the_end(world):
    other = "s-1:train:1"
    await add_run(world, other)
    record_folder(world.data_dir, RUN).parent.write_text("no folder")
    record = record_of(world)
    for run_id in (RUN, other):
        record.note_step(run_id, 1, {"loss": 0.5})
    await record.close()
    assert await points(record_of(world, 2), "tandem/loss", other) == {1: 0.5}
    assert list(record._pending) == [RUN]


@pytest.mark.parametrize(
    ("fault", "error"), [(Fault.FULL, StorageFull), (Fault.LOST, StorageFailed)]
)
async def test_a_failing_disk_is_an_error_to_repeat_and_loses_nothing(tmp_path, fault, error):
    root = tmp_path / "data"
    root.mkdir()
    world = Store(root, url=f"sqlite:///{tmp_path / 'tandem.db'}")
    await world.database.open()
    with UnreliableDisk(root) as disk:
        hit = []
        for number, strike in enumerate(disk.strikes(fault)):
            run_id = f"s-1:train:{number}"
            await add_run(world, run_id)
            record = record_of(world)
            await record.append_metrics(run_id, [row(1, a=1)], "user")
            with strike:
                try:
                    await record.append_metrics(run_id, [row(2, a=2)], "user")
                    await record.append_rollouts(run_id, "x", 2, [{"answer": "a"}])
                except StorageFailed as failure:
                    assert type(failure) is error and failure.retry_after
                    hit.append(strike.hit)
            await record.append_metrics(run_id, [row(2, a=2)], "user")
            await record.append_rollouts(run_id, "x", 2, [{"answer": "a"}])
            assert await points(record, "a", run_id) == {1: 1, 2: 2}
            assert (await record.rollouts(run_id, 2)).total_count == 1
            await record.close()
        assert hit
    await world.database.close()


async def test_the_servers_rows_wait_for_a_disk_that_fails(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    world = Store(root, url=f"sqlite:///{tmp_path / 'tandem.db'}")
    await world.database.open()
    await add_run(world, RUN)
    record = record_of(world)
    with UnreliableDisk(root) as disk, disk.strike_at(Fault.FULL, 1) as strike:
        for step in (1, 2):
            record.note_step(RUN, step, {"loss": step, "none": None})
        await until(lambda: not record._flushing)
        assert strike.hit and await points(record, "tandem/loss") == {1: 1, 2: 2}
    assert (await index_of(record)).last == {"tandem/loss": 2}
    await record.close()
    await world.database.close()


async def test_the_servers_rows_are_told_once_each_over_gateways(record, world):
    record.note_step(RUN, 1, {"loss": math.nan}, at=5.0)
    await record.append_metrics(RUN, [row(1, a=1)], "user")
    await until(lambda: not record._flushing)
    rows, end = await record.rows_after(RUN, Place(), only_server=True)
    assert rows == [MetricsRow(1, {"tandem/loss": "NaN"}, 5.0)]
    later = record_of(world, epoch=2)
    later.note_step(RUN, 2, {"loss": 1.0}, at=6.0)
    await later.close()
    rows, end = await record_of(world, epoch=3).rows_after(RUN, end, only_server=True)
    assert [one.step for one in rows] == [2]
    assert (await record.rows_after(RUN, end, only_server=True)) == ([], end)


async def test_a_step_with_a_reward_of_the_user_gets_no_reward_of_the_server(record):
    await record.append_metrics(RUN, [row(1, reward=1)], "user")
    await record.append_rollouts(RUN, "x", 1, [{"reward": 0}])
    assert not record._flushing and await points(record, "tandem/reward") == {}


async def test_a_run_without_new_rows_leaves_the_memory(record, monkeypatch):
    await record.append_metrics(RUN, [row(1, a=1)], "user")
    monkeypatch.setattr(store_module, "_IDLE", -1.0)
    record._forget_idle()
    assert not record._runs
    await record.append_metrics(RUN, [row(2, a=1)], "user")
    assert (await index_of(record)).rows == 2


async def test_ancestors_are_told_the_oldest_first_without_another_owners(world):
    for number, owner in ((1, "ann"), (2, "ann"), (3, "ben")):
        await add_run(world, f"s-1:train:{number}", owner=owner)
    for number in (0, 1, 2):
        note_parent(world.database, f"s-1:train:{number}", f"s-1:train:{number + 1}", 10 * number)
    note_parent(world.database, "s-1:train:3", "s-1:train:3", 0)
    await world.database.flush()
    found = await ancestors_of(world.database, RUN, lambda owner: owner == "ann")
    assert found == [("s-1:train:2", 10), ("s-1:train:1", 0)]
    found = await ancestors_of(world.database, RUN, lambda _: True)
    assert [run for run, _ in found] == [f"s-1:train:{number}" for number in (3, 2, 1)]
    circle = update(runs).where(runs.c.id == "s-1:train:3").values(parent_run=RUN, parent_step=1)
    await world.database.write(circle)
    assert len(await ancestors_of(world.database, RUN, lambda _: True)) == 3


async def test_a_rollouts_own_index_does_not_replace_its_place_in_the_step(record):
    await record.append_rollouts(RUN, "x", 1, [{"index": 7}, {"index": 0}])
    assert [one["index"] for one in (await record.rollouts(RUN, 1)).rollouts] == [0, 1]


async def test_the_curves_of_ancestors_are_downsampled_before_they_are_joined(
    record, world, monkeypatch
):
    parents = ["s-2:train:0", "s-3:train:0"]
    for number, run_id in enumerate([*parents, RUN]):
        if run_id != RUN:
            await add_run(world, run_id)
        steps = range(100 * number, 100 * number + 100)
        rows = [row(step, a=5 if step == 50 else -step) for step in steps]
        await record.append_metrics(run_id, rows, "user")
    held, real = [], store_module.joined

    def joined(parts):
        known = list(parts)
        held.extend(len(curves["a"].step) for curves, _ in known)
        return real(known)

    monkeypatch.setattr(store_module, "joined", joined)
    ancestors = list(zip(parents, (99, 199), strict=True))
    found = (await record.curves(RUN, None, 10, ancestors))["a"]
    assert len(held) == 3 and max(held) <= 20 and len(found.step) <= 10
    assert {5, -299} <= set(found.value.tolist())
    monkeypatch.setattr(store_module, "MOST_POINTS", 30)
    await record.curves(RUN, None, 100, ancestors)
    assert max(held[3:]) <= 20


async def test_only_the_lines_of_a_page_in_the_given_order_are_parsed(record, monkeypatch):
    for start in range(0, 30, 10):
        many = [{"number": number} for number in range(start, start + 10)]
        await record.append_rollouts(RUN, str(start), 1, many)
    parsed = []
    real = rollouts_module._parsed
    monkeypatch.setattr(rollouts_module, "_parsed", lambda line: parsed.append(line) or real(line))
    page = await record.rollouts(RUN, 1, limit=3, offset=18)
    assert [(one["index"], one["number"]) for one in page.rollouts] == [
        (n, n) for n in (18, 19, 20)
    ]
    assert page.total_count == 30 and len(parsed) == 3
    page = await record.rollouts(RUN, 1, "-reward", limit=3, offset=18)
    assert [one["index"] for one in page.rollouts] == [18, 19, 20] and page.total_count == 30


async def test_an_owners_scans_take_turns_and_end_with_their_requests(record, world, monkeypatch):
    other = "s-2:train:0"
    await add_run(world, other, owner="ben")
    stops, real = [], store_module.read_page
    free = threading.Event()

    def read_page(folder, batches, *, stopped, **options):
        if folder == record_folder(world.data_dir, RUN):
            stops.append(stopped)
            assert free.wait(60)
        return real(folder, batches, stopped=stopped, **options)

    monkeypatch.setattr(store_module, "read_page", read_page)
    first = asyncio.create_task(record.rollouts(RUN, 1, search="a"))
    await until(lambda: stops)
    others = [asyncio.create_task(record.rollouts(RUN, 1, search="a")) for _ in range(2)]
    assert (await record.rollouts(other, 1, search="a")).total_count == 0
    assert len(stops) == 1 and not stops[0]()
    first.cancel()
    await until(lambda: stops[0]())
    free.set()
    assert [page.total_count for page in await asyncio.gather(*others)] == [0, 0]
    assert len(stops) == 3


async def test_a_reading_beyond_its_time_says_what_to_read_instead(record, monkeypatch):
    monkeypatch.setattr(store_module, "_READ", 0.0)
    for reading in (record.rollouts(RUN, 1, "reward"), record.curves(RUN, None, 10)):
        with pytest.raises(StorageFailed, match="narrow the step"):
            await reading


async def test_a_huge_step_of_rollouts_is_read_page_by_page(record):
    many = [{"answer": "x" * 2**19, "reward": number} for number in range(64)]
    for start in range(0, 64, 16):
        await record.append_rollouts(RUN, str(start), 1, many[start : start + 16])
    page = await record.rollouts(RUN, 1, "-reward", limit=1000)
    assert page.total_count == 64 and 1 < len(page.rollouts) < 64  # 16 MiB
    assert page.rollouts[0]["reward"] == 63
    rows = await record.database.read(select(run_records.c.rollouts))
    assert rows[0]["rollouts"] == 64


async def test_pages_by_reward_end_after_a_number_of_rollouts_and_still_count_all(
    record, monkeypatch
):
    monkeypatch.setattr("gateway.runs.record.rollouts._MOST_FOUND", 3)
    await record.append_rollouts(RUN, "x", 1, [{"reward": number} for number in range(9)])
    page = await record.rollouts(RUN, 1, "-reward", limit=2, offset=2)
    assert [one["reward"] for one in page.rollouts] == [6] and page.total_count == 9


async def test_a_run_json_that_failed_is_written_with_the_next_change(record, world, monkeypatch):
    await add_run(world, "s-2:train:0")
    files, real = record.identity_files, identity_files.write_file

    def refuse(*_args, **_options):
        raise OSError("the disk is full")

    monkeypatch.setattr(identity_files, "write_file", refuse)
    files.write_soon(RUN)
    await files.close()
    monkeypatch.setattr(identity_files, "write_file", real)
    files.write_soon("s-2:train:0")
    await files.close()
    for run_id in (RUN, "s-2:train:0"):
        assert (record_folder(record.data_dir, run_id) / "run.json").is_file()
