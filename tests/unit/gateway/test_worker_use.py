from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import insert, select

from gateway.metrics import Metrics
from gateway.owners.auth.identity import Caller
from gateway.owners.usage.run_resources import read_run_use
from gateway.runs.record.rows import RunRecords
from gateway.storage.database import Database
from gateway.storage.tables import runs, usage, worker_use
from gateway.workers.requests import WorkerRequest
from gateway.workers.table import WorkerRow
from gateway.workers.worker_use import WorkerUseMeter
from tandem.protocol.process_use import ProcessUse
from tests.support.postgres import url_for

pytestmark = pytest.mark.usefixtures("each_database")

RUN = "s-1:train:0"
OTHER = "s-1:train:1"
TRAINER = WorkerRow(request=WorkerRequest(key=RUN, kind="trainer", owner="ann", session="s-1"))


@pytest.fixture
async def database(tmp_path):
    database = Database(url=url_for(tmp_path), data_dir=tmp_path)
    await database.open()
    yield database
    await database.close()


class World:
    """A meter, and a row that moves at chosen times."""

    def __init__(self, database, row=TRAINER):
        self.database, self.now, self.row = database, 0.0, row
        self.meter = WorkerUseMeter(database=database, metrics=Metrics(), clock=lambda: self.now)
        self.meter.note_state(row, 0.0)

    def becomes(self, state, *, at, waited=0.0):
        self.now, self.row = at, replace(self.row, state=state)
        self.meter.note_state(self.row, waited)

    def says(self, **values):
        self.meter.note_use(self.row.key, "trainer-1", ProcessUse(**values).model_dump_json())

    async def written(self, rows=None):
        self.meter.write([self.row] if rows is None else rows)
        await self.database.flush()
        return await self.database.read(select(worker_use))


async def test_the_seconds_of_a_row_are_those_of_its_states(database):
    world = World(database)
    world.becomes("placed", at=5.0)
    world.becomes("starting", at=6.0)
    world.becomes("awake", at=10.0)
    world.becomes("falling_asleep", at=30.0)
    world.becomes("asleep", at=31.0)
    world.becomes("waking", at=91.0, waited=20.0)
    world.becomes("awake", at=93.0)
    world.now = 100.0
    (row,) = await world.written()
    assert row["queue_seconds"] == 6.0 + 20.0
    assert row["start_seconds"] == 4.0 + 2.0
    assert row["run_seconds"] == 20.0 + 7.0
    world.now = 101.0  # the next gateway counts on
    following = WorkerUseMeter(database=database, metrics=Metrics(), clock=lambda: world.now)
    following.write([world.row])
    world.now = 103.0
    following.write([world.row])
    await database.flush()
    (row,) = await database.read(select(worker_use))
    assert row["run_seconds"] == 27.0 + 2.0


async def test_sums_grow_by_heartbeats_and_peaks_stay(database):
    world = World(database)
    world.becomes("awake", at=0.0)
    world.says(seconds=10, cpu_seconds=5, gpu_seconds=6, gpu_peak=0.9, gpu_bytes=70, memory_bytes=9)
    await world.written()
    world.says(seconds=20, cpu_seconds=7, gpu_seconds=7, gpu_peak=0.9, gpu_bytes=50, memory_bytes=4)
    (row,) = await world.written()
    names = ("measured_seconds", "cpu_seconds", "gpu_seconds", "gpu_measured_seconds")
    assert [row[name] for name in names] == [20, 7, 7, 20]
    assert (row["gpu_memory_peak"], row["memory_peak"], row["gpu_peak"]) == (70, 9, 0.9)
    assert row["gpu_shared_seconds"] == 0


async def test_the_next_gateway_counts_a_survivors_use_from_its_first_heartbeat(database):
    world = World(database)
    world.row = replace(world.row, process="trainer-1")
    world.becomes("awake", at=0.0)
    world.says(seconds=10, cpu_seconds=5, gpu_seconds=6)
    await world.written()
    world.meter = WorkerUseMeter(database=database, metrics=Metrics(), clock=lambda: world.now)
    await world.written()
    world.says(seconds=30, cpu_seconds=15, gpu_seconds=16)
    world.says(seconds=40, cpu_seconds=17, gpu_seconds=20)
    (row,) = await world.written()
    names = ("measured_seconds", "cpu_seconds", "gpu_seconds")
    assert [row[name] for name in names] == [10 + 10, 5 + 2, 6 + 4]
    world.meter.note_use(RUN, "trainer-2", ProcessUse(seconds=3.0).model_dump_json())
    (row,) = await world.written()
    assert row["measured_seconds"] == 20 + 3


async def test_the_next_gateway_counts_the_use_of_the_process_that_it_starts_from_its_start(
    database,
):
    world = World(database, replace(TRAINER, state="starting", process="trainer-1"))
    world.becomes("awake", at=0.0)
    world.says(seconds=10)
    (row,) = await world.written()
    assert row["measured_seconds"] == 10


async def test_the_load_of_a_shared_device_counts_only_while_the_worker_is_awake(database):
    world = World(database)
    world.becomes("awake", at=0.0)
    world.says(seconds=10, gpu_seconds=8, gpu_peak=0.8, shared=True)
    world.becomes("falling_asleep", at=10.0)
    world.becomes("asleep", at=11.0)
    world.says(seconds=20, gpu_seconds=18, gpu_peak=1.0, shared=True)  # the load of another
    (row,) = await world.written()
    assert (row["gpu_seconds"], row["gpu_shared_seconds"], row["gpu_peak"]) == (8, 10, 0.8)


def run_row(run_id):
    return {
        "id": run_id,
        "session_id": "s-1",
        "base_model": "tiny",
        "training": {"lora": {"rank": 4}},
        "asks": {"ranks": 2},
        "host": RUN,
        "owner": "ann",
        "state": "active",
        "created_at": 0.0,
    }


def used(run_id, *, event="forward_backward", seconds=0.0, tokens=0, sampled=0):
    return {
        "hour": 0,
        "event": event,
        "subject": run_id if event != "sample" else f"s-1:sample:{run_id[-1]}",
        "run_id": run_id,
        "session_id": "s-1",
        "owner": "ann",
        "base_model": "tiny",
        "count": 1,
        "input_tokens": tokens,
        "cached_tokens": 0,
        "output_tokens": sampled,
        "accelerator_seconds": seconds,
    }


async def test_runs_of_one_trainer_share_it_by_their_computing_seconds(database):
    await database.write(insert(runs).values([run_row(RUN), run_row(OTHER)]))
    await database.write(
        insert(usage).values(
            [
                used(RUN, seconds=30.0, tokens=7),
                used(OTHER, seconds=10.0, tokens=3),
                used(RUN, event="sample", seconds=2.0, tokens=5, sampled=4),
            ]
        )
    )
    world = World(database)
    world.becomes("awake", at=0.0)
    world.says(seconds=100, cpu_seconds=40, gpu_seconds=80, gpu_peak=1.0, gpu_bytes=50)
    world.now = 100.0
    await world.written()
    mine, other = await read_run_use(database, RUN), await read_run_use(database, OTHER)
    assert (mine.trainer.share, other.trainer.share) == (0.75, 0.25)
    assert (mine.trainer.compute_seconds, mine.trainer.duty) == (15.0, 0.15)
    assert (mine.trainer.cpu_average, other.trainer.cpu_average) == (0.3, 0.1)
    assert (mine.trainer.gpu_average, other.trainer.gpu_average) == pytest.approx((0.6, 0.2))
    assert mine.trainer.gpu_memory_peak_bytes == other.trainer.gpu_memory_peak_bytes == 50
    assert mine.trainer.measured == "process"
    assert (mine.training_tokens, mine.prompt_tokens, mine.sampled_tokens) == (7, 5, 4)
    assert (other.training_tokens, other.sampled_tokens) == (3, 0)
    assert mine.sampler is None


async def test_a_run_without_a_measurement_has_no_numbers_instead_of_zeros(database):
    await database.write(insert(runs).values(run_row(RUN)))
    world = World(database)
    world.becomes("awake", at=0.0)
    world.now = 10.0
    await world.written()
    trainer = (await read_run_use(database, RUN)).trainer
    assert (trainer.run_seconds, trainer.duty) == (10.0, 0.0)
    unknown = ("cpu_average", "memory_peak_bytes", "gpu_average", "gpu_peak", "measured")
    assert [getattr(trainer, name) for name in unknown] == [None] * 5


async def test_a_caller_gets_the_names_of_its_own_runs_only(database):
    mine, others = run_row(RUN) | {"name": "mine"}, run_row(OTHER) | {"name": "b", "owner": "bob"}
    await database.write(insert(runs).values([mine, others]))
    records = RunRecords(database)
    for caller, names in (
        (Caller("ann", "k-1", "member"), {RUN: "mine"}),
        (Caller("ops", "k-2", "admin"), {RUN: "mine", OTHER: "b"}),
    ):
        assert await records.names([RUN, OTHER], caller) == names
