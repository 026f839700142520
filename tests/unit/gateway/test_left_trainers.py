"""Trainers that an earlier gateway has left, before this one has adopted them."""

from __future__ import annotations

import asyncio

from gateway.placement.lease_records import LeaseRecord
from tandem.errors import CannotSleep
from tandem.protocol.worker import WorkerSpec
from tandem.v1 import common_pb2, trainer_pb2
from tests.support.gateway.freezing_agent import Trainer, World, with_freezing_agent
from tests.support.gateway.model_workers import ModelTrainer


class LeftTrainer(ModelTrainer):
    """Sleeps when it is at no operation; `at_work` is the one that it is at."""

    asleep = False
    at_work = 0
    hosted = ("a",)

    async def Describe(self, request):
        return trainer_pb2.DescribeTrainerReply(run_ids=self.hosted, last_seq_id=1)

    async def RemoveRun(self, request):
        await asyncio.sleep(1500)  # it is at something of the gateway before
        return trainer_pb2.RemoveRunReply()

    async def Progress(self, request):
        return trainer_pb2.ProgressReply(seq_id=self.at_work)

    async def Sleep(self, request):
        assert not self.at_work
        self.asleep = True
        return common_pb2.SwitchReply()

    async def Wake(self, request):
        self.asleep = False
        return common_pb2.SwitchReply()


class ForeignTrainer(LeftTrainer):
    """One whose backend does not know how to sleep."""

    async def Sleep(self, request):
        return common_pb2.SwitchReply(failure=CannotSleep("it cannot").to_failure())


async def left(world: World, kind: type[LeftTrainer] = LeftTrainer) -> tuple[LeftTrainer, Trainer]:
    """A trainer of the gateway before, which had the devices there, and the run's in this one."""
    spec = WorkerSpec(
        worker_id="left",
        kind="trainer",
        secret="a secret",
        model_name="tiny",
        model_path="tiny",
        session_id="s",
        run_id="a",
    )
    process = world.host.workers["left"] = kind(spec, world.host.misfortune)
    await world.fleet.close(leaving=True)
    world.fleet = world.new_fleet()
    await world.fleet.open()
    world.leases.records.rows["a"] = LeaseRecord(held=True, token=1, since=0.0, seconds=0.0)
    return process, world.trainer("a")


@with_freezing_agent
async def test_a_trainer_that_nobody_adopted_sleeps_when_another_needs_its_devices(world):
    process, a = await left(world)
    assert a.lease.state == "held"
    b = world.trainer("b")
    async with asyncio.timeout(60), b.lease.use():
        assert process.asleep
    assert world.host.workers == {"left": process}


@with_freezing_agent
async def test_a_trainer_that_was_put_to_sleep_before_its_adoption_is_adopted_and_woken(world):
    process, a = await left(world)
    async with world.trainer("b").lease.use():
        pass
    assert await a.host.adopt(a.run, on_exit=lambda _reason: None) is not None
    assert process.asleep
    async with asyncio.timeout(60), a.lease.use() as token:
        assert not process.asleep
        assert a.host.worker.lease == token


@with_freezing_agent
async def test_a_trainer_that_nobody_adopted_ends_what_it_is_at_before_it_sleeps(world):
    process, _ = await left(world)
    process.at_work = 2
    waits = asyncio.create_task(world.trainer("b").lease.enter())
    await asyncio.sleep(30)
    assert not waits.done()
    process.at_work = 0
    async with asyncio.timeout(60):
        await waits
    assert process.asleep


@with_freezing_agent
async def test_a_trainer_that_its_host_suspends_counts_as_its_session_said(world):
    _, a = await left(world, ForeignTrainer)
    a.lease.residence.host_need = 5
    async with asyncio.timeout(60), world.trainer("b").lease.use():
        assert a.lease.residence.sleep_way == "host"
        assert world.leases.memory.used == 5


@with_freezing_agent
async def test_a_run_may_end_while_its_trainer_is_to_sleep_that_nobody_adopted(world):
    process, a = await left(world)
    a.host.runs.add("other")
    process.at_work = 2
    waits = asyncio.create_task(world.trainer("b").lease.enter())
    await asyncio.sleep(30)
    a.host.runs.discard("other")
    process.at_work = 0
    async with asyncio.timeout(60):
        await waits
    assert process.asleep


@with_freezing_agent
async def test_a_frozen_trainer_that_nobody_adopted_is_killed_when_another_needs_its_devices(world):
    process, _ = await left(world)
    process.frozen = True
    async with asyncio.timeout(1000), world.trainer("b").lease.use():
        assert process.died.done()


@with_freezing_agent
async def test_a_trainer_that_is_busy_is_adopted_though_it_still_has_a_run_that_has_ended(world):
    process, a = await left(world)
    process.hosted = ("a", "ended")
    assert await a.host.adopt(a.run, on_exit=lambda _reason: None) is not None
    assert a.host.hosted == {"a"} and not process.died.done()


@with_freezing_agent
async def test_a_trainer_that_is_adopted_within_a_use_is_called_with_its_lease(world):
    _, a = await left(world)
    async with a.lease.use() as token:
        await a.host.adopt(a.run, on_exit=lambda _reason: None)
        assert a.host.worker.lease == token
