"""What is known of a worker that was stopped, while its agent freezes and answers later."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.runs.trainer_host import DevicesLost
from tandem.errors import WorkerStartFailed
from tandem.protocol.worker import TrainingSpec
from tests.support.gateway.freezing_agent import PATIENCE, with_freezing_agent
from tests.support.virtual_time import now

# --- The fleet ------------------------------------------------------------------------------------


@with_freezing_agent
async def test_a_worker_is_stopped_when_the_agent_says_so_and_not_before(world):
    worker = await world.start()
    world.freeze()
    stop = asyncio.create_task(world.fleet.stop(worker, reason="over"))
    await asyncio.sleep(1000)
    assert not stop.done()
    world.thaw()
    await stop
    assert world.host.workers == {}


@with_freezing_agent
async def test_an_agent_that_does_not_answer_is_asked_again_after_a_pause(world):
    worker = await world.start()
    world.freeze()
    stop = asyncio.create_task(world.fleet.stop(worker, reason="over"))
    await asyncio.sleep(1000)
    gaps = [b - a for a, b in zip(world.launcher.asked, world.launcher.asked[1:], strict=False)]
    assert len(gaps) > 10
    assert min(gaps) == pytest.approx(PATIENCE + 5)
    world.thaw()
    await stop


@with_freezing_agent
async def test_a_stop_goes_on_when_nobody_waits_for_it_any_more(world):
    worker = await world.start()
    world.freeze()
    stop = asyncio.create_task(world.fleet.stop(worker, reason="over"))
    await asyncio.sleep(1)
    stop.cancel()
    await asyncio.sleep(1000)
    world.thaw()
    await asyncio.sleep(1)
    assert world.host.workers == {}


@with_freezing_agent
async def test_the_agent_is_asked_no_more_often_when_several_wait_for_the_same_end(world):
    worker = await world.start()
    world.freeze()
    for _ in range(20):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(50):
                await world.fleet.stop(worker, reason="over", at_once=True)
    assert len(world.launcher.asked) < 1000 / PATIENCE
    world.thaw()
    await world.fleet.stop(worker, reason="over", at_once=True)


@with_freezing_agent
async def test_a_start_that_nobody_answered_fails_when_nothing_of_the_worker_is_left(world):
    world.freeze()
    start = asyncio.create_task(world.start())
    await asyncio.sleep(1000)
    assert not start.done()
    assert len(world.host.workers) == 1, "the agent has heard of it"
    world.thaw()
    with pytest.raises(WorkerStartFailed, match="answers nothing"):
        await start
    assert world.host.workers == {}


@with_freezing_agent
async def test_a_worker_that_was_given_up_is_told_to_have_ended_when_it_is_known(world):
    worker = await world.start()
    world.freeze()
    world.fleet.give_up(worker, reason="it is silent")
    await asyncio.sleep(1000)
    assert [record.worker for record in world.fleet.all()] == [worker]
    world.thaw()
    await world.fleet.end(worker, reason="it is silent")
    assert world.fleet.all() == []


@with_freezing_agent
async def test_a_gateway_that_stops_leaves_what_it_could_not_stop_to_the_next_one(world):
    worker = await world.start()
    world.freeze()
    stop = asyncio.create_task(world.fleet.stop(worker, reason="over"))
    await asyncio.sleep(1)
    await world.fleet.close(leaving=True)
    await asyncio.gather(stop, return_exceptions=True)
    assert list(world.host.workers) == [worker.worker_id]
    asked = len(world.launcher.asked)
    world.thaw()
    await asyncio.sleep(1000)
    assert len(world.launcher.asked) == asked, "the one before asks no more"
    world.fleet = world.new_fleet()
    await world.fleet.open()
    await world.fleet.stop_left()
    assert world.host.workers == {}


@with_freezing_agent
async def test_a_connection_that_broke_waits_for_the_end_while_nobody_could_report_it(world):
    died = asyncio.Event()
    world.freeze()
    waiting = asyncio.create_task(world.fleet.await_exit(died, patience=5))
    await asyncio.sleep(1000)
    assert not waiting.done()
    world.thaw()
    began = now()
    await waiting
    assert now() - began <= 10, "it answers, and reports no end"


# --- The lease ------------------------------------------------------------------------------------


@with_freezing_agent
async def test_a_lease_does_not_move_while_the_agent_cannot_say_that_its_holder_is_gone(world):
    """The holder does not sleep, and is to be killed for it."""
    a, b = await world.started("a"), world.trainer("b")
    (holder,) = world.host.workers.values()
    holder.frozen = True
    world.freeze()
    waits = asyncio.create_task(b.lease.enter())
    await asyncio.sleep(5000)
    assert not waits.done()
    assert a.lease.state == "sleeping"
    world.thaw()
    async with asyncio.timeout(60):
        await waits
    assert holder.died.done()
    b.lease.leave()


@with_freezing_agent
async def test_a_run_that_ends_gives_up_place_and_lease_when_its_trainer_is_gone(world):
    a, b = await world.started("a"), world.trainer("b")
    (holder,) = world.host.workers.values()
    world.freeze()
    close = asyncio.create_task(a.end())
    waits = asyncio.create_task(b.lease.enter())
    await asyncio.sleep(5000)
    assert not waits.done() and not close.done()
    assert not a.released
    world.thaw()
    async with asyncio.timeout(60):
        await waits
        await close
    assert holder.died.done()
    assert a.released == ["a"]
    b.lease.leave()


@with_freezing_agent
async def test_a_stop_that_was_cancelled_leaves_the_lease_to_the_stop_that_follows(world):
    """A run ends while its trainer is stopped to be restored."""
    a, b = await world.started("a"), world.trainer("b")
    world.freeze()
    stop = asyncio.create_task(a.host.end_process(a.client, "it is of no use"))
    await asyncio.sleep(1)
    stop.cancel()
    close = asyncio.create_task(a.end())
    waits = asyncio.create_task(b.lease.enter())
    await asyncio.sleep(1000)
    assert not waits.done() and not close.done()
    world.thaw()
    async with asyncio.timeout(60):
        await waits
    b.lease.leave()


@with_freezing_agent
async def test_a_stop_that_nobody_waits_for_any_more_gives_the_devices_free_all_the_same(world):
    a, b = await world.started("a"), world.trainer("b")
    world.freeze()
    stop = asyncio.create_task(a.host.end_process(a.client, "it is of no use"))
    await asyncio.sleep(1)
    stop.cancel()
    await asyncio.sleep(1000)
    assert a.lease.present
    world.thaw()
    async with asyncio.timeout(60), b.lease.use():
        assert a.host.worker is None
    async with a.lease.use():
        await a.start()


@with_freezing_agent
async def test_a_trainer_that_is_brought_back_leaves_others_the_devices_between_its_calls(world):
    a, b = await world.started("a"), world.trainer("b")
    bringing_back = asyncio.create_task(a.bring_back(calls=5))
    for _ in range(3):
        async with asyncio.timeout(10), b.lease.use():
            await asyncio.sleep(1)
    assert not bringing_back.done()
    assert await bringing_back == 5


@with_freezing_agent
async def test_a_trainer_that_ends_while_it_waits_for_its_devices_did_not_die_of_its_call(world):
    a, b = await world.started("a"), world.trainer("b")
    (process,) = world.host.workers.values()
    bringing_back = asyncio.create_task(a.bring_back(calls=5))
    async with b.lease.use():
        await asyncio.sleep(10)
        process.kill()
    with pytest.raises(DevicesLost):
        await bringing_back
    assert a.restoration.at is None


@with_freezing_agent
async def test_gradients_of_a_run_that_leaves_its_trainer_to_others_hold_the_devices_no_more(world):
    a = await world.started("a")
    run: Any = SimpleNamespace(id="b", training=TrainingSpec())
    a.host.runs.add(run.id)
    async with a.lease.use(begins_step=run.id):
        await a.host.join(run, on_exit=lambda _reason: None)
    await a.host.leave(run.id, "its session has ended")
    assert a.host.hosted == {"a"}
    assert not a.lease.in_step
