"""Trainers and their rows while workers or their launcher freeze, and answer later."""

from __future__ import annotations

import asyncio
import contextlib
from unittest.mock import patch

import pytest

from gateway.runs.trainer_host import DevicesLost
from gateway.workers.step_runner import ASK_AGAIN_SECONDS
from tandem.errors import WorkerStartFailed
from tests.support.gateway.freezing_launcher import PATIENCE, with_freezing_launcher
from tests.support.virtual_time import now

# --- Stops ----------------------------------------------------------------------------------------


@with_freezing_launcher
async def test_a_run_has_left_and_others_have_its_devices_when_nothing_of_its_trainer_is_left(
    world,
):
    a, b = await world.started("a"), await world.trainer("b")
    process = world.process
    world.freeze()
    leaves, waits = asyncio.create_task(a.leave()), asyncio.create_task(b.compute())
    await asyncio.sleep(5000)
    assert not leaves.done() and not waits.done()
    assert world.row("a").state == "stopping"
    world.thaw()
    async with asyncio.timeout(60):
        await leaves
        await waits
    assert process.died.done()
    assert world.table.rows.keys() == {"b"}


@with_freezing_launcher
async def test_a_launcher_is_asked_again_after_a_pause_however_many_wait_for_the_same_end(world):
    await world.started("a")
    process = world.row("a").process
    world.freeze()
    for _ in range(20):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(50):
                await world.supervisor.end_process("a", process, "it is of no use")
    gaps = [b - a for a, b in zip(world.launcher.asked, world.launcher.asked[1:], strict=False)]
    assert len(gaps) > 10
    assert min(gaps) == pytest.approx(PATIENCE + ASK_AGAIN_SECONDS)


@with_freezing_launcher
async def test_a_stop_goes_on_when_nobody_waits_for_it_any_more_and_frees_the_devices(world):
    a, b = await world.started("a"), await world.trainer("b")
    world.freeze()
    stop = asyncio.create_task(a.host.end_process(a.client, "it is of no use"))
    await asyncio.sleep(1)
    stop.cancel()
    await asyncio.sleep(1000)
    assert world.row("a").occupies
    world.thaw()
    async with asyncio.timeout(60):
        await b.compute()
        await a.start()


@with_freezing_launcher
async def test_a_run_may_end_after_a_stop_that_was_cancelled(world):
    a, b = await world.started("a"), await world.trainer("b")
    world.freeze()
    stop = asyncio.create_task(a.host.end_process(a.client, "it is of no use"))
    await asyncio.sleep(1)
    stop.cancel()
    leaves = asyncio.create_task(a.leave())
    await asyncio.sleep(1000)
    assert not leaves.done()
    world.thaw()
    async with asyncio.timeout(60):
        await leaves
        await b.compute()


@with_freezing_launcher
async def test_a_start_that_nobody_answered_keeps_its_devices_until_nothing_of_it_is_left(world):
    a, b = await world.trainer("a"), await world.trainer("b")
    world.freeze()
    with pytest.raises(WorkerStartFailed, match="answers nothing"):
        async with asyncio.timeout(1000):
            await a.start()
    process = world.process
    waits = asyncio.create_task(b.compute())
    await asyncio.sleep(1000)
    assert (world.row("a").state, waits.done()) == ("stopping", False)
    world.thaw()
    async with asyncio.timeout(60):
        await waits
    assert process.died.done()


@with_freezing_launcher
async def test_the_end_of_a_worker_is_told_when_it_is_known(world):
    a = await world.started("a")
    world.freeze()
    world.supervisor.note_failure("a", world.row("a").process, "it is of no use")
    await asyncio.sleep(1000)
    assert (a.told, len(world.host.workers)) == ([], 1)
    world.thaw()
    await asyncio.sleep(60)
    assert (a.told, world.host.workers) == (["it is of no use"], {})


@with_freezing_launcher
async def test_a_gateway_that_ends_leaves_a_stop_without_answer_to_the_next_one(world):
    a = await world.started("a")
    world.freeze()
    leaves = asyncio.create_task(a.leave())
    await asyncio.sleep(1)
    await world.close_gateway()
    leaves.cancel()
    asked = len(world.launcher.asked)
    world.thaw()
    await asyncio.sleep(1000)
    assert (len(world.launcher.asked), len(world.host.workers)) == (asked, 1)
    await world.new_gateway()
    await asyncio.sleep(10)
    assert world.host.workers == world.table.rows == {}


@with_freezing_launcher
async def test_a_broken_connection_waits_for_the_end_while_nobody_could_report_it(world):
    world.freeze()
    waiting = asyncio.create_task(
        world.processes.await_exit("trainer-s-1", asyncio.Event(), patience=5)
    )
    await asyncio.sleep(1000)
    assert not waiting.done()
    world.thaw()
    began = now()
    await waiting
    assert now() - began <= 10, "the launcher answers, and reports no end"


# --- Turns ----------------------------------------------------------------------------------------


@with_freezing_launcher
async def test_a_frozen_trainer_keeps_its_devices_until_its_launcher_says_that_it_is_gone(world):
    await world.started("a")
    b, holder = await world.trainer("b"), world.process
    holder.frozen = True
    world.freeze()
    waits = asyncio.create_task(b.compute())
    await asyncio.sleep(5000)
    assert (world.row("a").state, waits.done()) == ("stopping", False)
    world.thaw()
    async with asyncio.timeout(60):
        await waits
    assert holder.died.done()


@pytest.mark.parametrize("who", ["the worker", "the launcher"])
def test_a_trainer_is_lost_until_the_worker_or_the_launcher_answers(who, tmp_path):
    @with_freezing_launcher
    async def scenario(world):
        a = await world.started("a")
        lost = world.process
        lost.frozen = True
        world.freeze()
        await asyncio.sleep(1000)
        assert world.row("a").state == "lost"
        assert "neither it nor its launcher answers" in a.host.explain()
        use = asyncio.create_task(a.compute())
        await asyncio.sleep(5000)
        assert (world.row("a").state, use.done(), lost.died.done()) == ("lost", False, False)
        assert "neither it nor its launcher answers" in a.host.explain()
        if who == "the worker":
            lost.frozen = False
        else:
            world.thaw()
        async with asyncio.timeout(200):
            process = await use
        assert (process == lost.spec.worker_id) == (who == "the worker")
        assert [*world.host.workers] == [process]

    scenario(tmp_path)


@with_freezing_launcher
async def test_a_trainer_that_is_brought_back_leaves_others_the_devices_between_its_calls(world):
    a, b = await world.started("a"), await world.trainer("b")
    bringing_back = asyncio.create_task(a.bring_back(calls=5))
    for _ in range(3):
        async with asyncio.timeout(10):
            await b.compute(1)
    assert not bringing_back.done()
    assert await bringing_back == 5


@with_freezing_launcher
async def test_a_trainer_that_ends_while_it_waits_for_its_devices_did_not_die_of_its_call(world):
    a, b = await world.started("a"), await world.trainer("b")
    process = world.process
    bringing_back = asyncio.create_task(a.bring_back(calls=5))
    async with b.host.use():
        await asyncio.sleep(10)
        process.kill()
    with pytest.raises(DevicesLost):
        await bringing_back
    assert a.restoration.at is None


@with_freezing_launcher
async def test_gradients_of_a_run_that_leaves_a_shared_trainer_hold_the_devices_no_more(world):
    a = await world.started("a")
    other = a.host.runs["b"] = a.run_named("b")
    await a.host.place(world.row("a").request, "b")
    await a.host.join(other)
    async with a.host.turn("b", "forward_backward"):
        pass
    calls = world.supervisor.roster.calls_of("a")
    assert (calls.open_steps, a.host.hosted) == ({"b"}, {"a", "b"})
    await a.host.leave("b")
    assert (calls.open_steps, a.host.hosted) == (set(), {"a"})


# --- Trainers of an earlier gateway ---------------------------------------------------------------


@with_freezing_launcher
async def test_a_run_lets_go_of_its_trainer_though_a_fault_keeps_it_in_the_process(world):
    a = await world.started("a")
    other = a.host.runs["b"] = a.run_named("b")
    await a.host.place(world.row("a").request, "b")
    await a.host.join(other)
    with (
        patch.object(a.host, "_remove", side_effect=ValueError("a fault")),
        pytest.raises(ValueError, match="a fault"),
    ):
        await a.host.leave("b")
    assert world.row("a").holders == ("a",)


@with_freezing_launcher
async def test_a_trainer_that_nobody_took_up_sleeps_for_others_and_wakes_when_it_is_taken_up(world):
    process, a = await world.left()
    b = await world.trainer("b")
    async with asyncio.timeout(60), b.host.use():
        assert process.asleep
    assert await a.take_up()
    assert not process.asleep
    assert a.host.worker.lease == world.row("a").token
    assert process.spec.worker_id in world.host.workers


@with_freezing_launcher
async def test_a_trainer_of_an_earlier_gateway_ends_its_operation_before_it_sleeps(world):
    process, a = await world.left()
    b = await world.trainer("b")
    a.host.runs["other"] = a.run_named("other")
    process.at_work = 2
    waits = asyncio.create_task(b.compute())
    await asyncio.sleep(30)
    assert not waits.done()
    await a.host.leave("other")  # a run may end meanwhile
    process.at_work = 0
    async with asyncio.timeout(60):
        await waits
    assert process.asleep


@with_freezing_launcher
async def test_a_trainer_may_be_at_an_operation_of_an_earlier_gateway_longer_than_a_switch(world):
    process, _ = await world.left()
    b = await world.trainer("b")
    process.at_work = 2
    waits = asyncio.create_task(b.compute())
    await asyncio.sleep(1500)
    reason = world.supervisor.explain("b").reason
    assert "cannot be put to sleep: it is at a call of an earlier gateway" in reason
    row = world.row("a")
    assert (row.state, world.adapter.require(row).lease) == ("awake", row.token)
    assert process.wakes > 100  # each tells it the token of a sleep that it refused
    process.at_work = 0
    async with asyncio.timeout(60):
        await waits
    assert process.asleep and not process.died.done()


@with_freezing_launcher
async def test_a_trainer_that_does_not_end_an_operation_of_an_earlier_gateway_is_killed(world):
    process, _ = await world.left()
    b = await world.trainer("b")
    process.at_work = 2
    waits = asyncio.create_task(b.compute())
    await asyncio.sleep(1700)
    assert not process.died.done()
    async with asyncio.timeout(200):
        await waits
    assert process.died.done()


@with_freezing_launcher
async def test_a_busy_trainer_of_an_earlier_gateway_ends_with_its_run(world):
    process, _ = await world.left()
    b = await world.trainer("b")
    process.at_work = 2
    waits = asyncio.create_task(b.compute())
    await asyncio.sleep(30)
    async with asyncio.timeout(10):
        await world.supervisor.release("a", holder="a")
        await waits
    assert process.died.done()


@with_freezing_launcher
async def test_a_suspended_trainer_of_an_earlier_gateway_counts_with_the_bytes_of_its_request(
    world,
):
    process, _ = await world.left(host_bytes=5)
    process.foreign = True
    b = await world.trainer("b")
    async with asyncio.timeout(60), b.host.use():
        overview = world.supervisor.overview()
        assert (overview.bytes_of(world.row("a")).way, overview.host_bytes_in_use) == ("host", 5)


@with_freezing_launcher
async def test_a_frozen_trainer_of_an_earlier_gateway_is_killed_for_others(world):
    process, _ = await world.left()
    process.frozen = True
    b = await world.trainer("b")
    async with asyncio.timeout(1000):
        await b.compute()
    assert process.died.done()


@with_freezing_launcher
async def test_a_busy_trainer_is_taken_up_though_it_still_has_a_run_that_has_ended(world):
    process, a = await world.left()
    process.runs["ended"], process.removal_seconds = process.runs["a"], 1500.0
    assert await a.take_up()
    assert (a.host.hosted, process.died.done()) == ({"a"}, False)
