"""Samples and loads wait for engines without a place, without devices or without an answer, in
virtual time."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from tandem.errors import OperationTimedOut, SessionFinished
from tandem.v1 import common_pb2, sampler_pb2
from tests.support.gateway.model_workers import ModelSampler
from tests.support.gateway.replica_world import (
    DEVICES,
    by_one,
    engines,
    many,
    saved,
    serving,
    states,
)
from tests.support.gateway.sampler_world import LOAD_TIMEOUT, TURNS, World
from tests.support.virtual_time import now
from tests.support.waiting import until


async def losing(world: World, replicas: int) -> ModelSampler:
    """Have that many engines that serve, and lose the first."""
    await serving(world, replicas)
    first = world.sampler().engine
    process = world.host.workers[first.process]
    process.frozen, world.launcher.reports = True, False
    world.supervisor.roster.note(first.row.moved("lost", at=now()))
    return process


def test_a_sample_of_a_lost_engine_fails_in_time_and_shows_why_it_waits(new_world):
    world = new_world(1)

    async def scenario():
        process = await losing(world, 1)
        asked = asyncio.create_task(world.sample())
        await asyncio.sleep(LOAD_TIMEOUT - 50)
        assert "neither it nor its launcher answers" in world.sampler().explain()
        assert not asked.done()
        async with asyncio.timeout(100):
            assert await asked == OperationTimedOut.type
        with pytest.raises(OperationTimedOut, match="neither it nor its launcher answers"):
            await world.sampler().load(saved(world, "v2"))
        process.frozen = False
        await world.sample()
        assert process.answered
        world.launcher.reports = True

    world.run(scenario())


def test_a_sample_of_a_lost_engine_goes_to_another_one_in_the_end(new_world):
    world, alone = new_world(), new_world(1)
    answers = []

    async def scenario():
        lost = await losing(world, 2)
        answers.append(await world.sample())
        assert LOAD_TIMEOUT <= now() < LOAD_TIMEOUT + 50
        assert not lost.answered
        world.launcher.reports = True

    async def undisturbed():
        await serving(alone, 1)
        assert [await alone.sample()] == answers

    world.run(scenario())
    alone.run(undisturbed())


def test_a_sample_that_was_answered_leaves_the_engine_idle_at_once(new_world):
    world = new_world(1)

    async def scenario():
        await serving(world, 1)
        (engine,) = world.sampler().engines
        calls = world.supervisor.roster.calls_of(engine.key)
        version = world.version("v1")
        seen: list[int] = []

        async def send(_client: object) -> None:
            seen.append(calls.uses)

        await engine.call(send, version=version)
        assert (seen, calls.uses) == ([1], 0)

    world.run(scenario())


def test_a_load_that_waits_for_devices_ends_with_its_sampler(new_world):
    world = new_world(1, groups=TURNS)

    async def scenario():
        await serving(world, 1)
        (engine,) = world.sampler().engines
        await world.sample(session_id="s-2")
        (second,) = (each for each in engines(world) if each.spec.session_id == "s-2")
        second.seconds = 5000.0
        busy = asyncio.create_task(world.sample(session_id="s-2"))
        await until(lambda: engine.row.state == "asleep" and not busy.done())
        load = asyncio.create_task(world.sampler().load(saved(world, "v2")))
        await until(lambda: engine.waits_for_devices)
        await world.router.end_session("s-1", SessionFinished("over"))
        async with asyncio.timeout(10):
            with pytest.raises(SessionFinished, match="over"):
                await load

    world.run(scenario())


def test_an_engine_wakes_with_the_version_that_the_oldest_waiting_request_wants(new_world):
    world, woken = new_world(1, groups=TURNS), []

    async def scenario():
        (engine,) = await serving(world, 1)
        wake = engine.Wake

        async def load_as_it_wakes(request):
            await wake(request)
            await engine.Load(sampler_pb2.LoadRequest(version=request.version))
            woken.append(world.sampler().engine.weights)
            return common_pb2.SwitchReply(version=request.version)

        engine.Wake = load_as_it_wakes
        await world.sample("v1")
        await world.sample(session_id="s-2")
        samples = [asyncio.create_task(world.sample(version)) for version in ("v2", "v3")]
        await until(lambda: world.sampler().engine.weights == "s-1:train:0/v2")
        assert woken == ["s-1:train:0/v1"] and engine.answered == ["s-1:train:0/v1"]
        await asyncio.gather(*samples)

    world.run(scenario())


def test_without_a_run_engines_start_when_all_have_a_place(new_world):
    world = new_world(2, groups=DEVICES[:2], engine_quantum=0)

    async def scenario():
        await world.open()
        other = world.sampler("s-2")
        await world.router.scale(other, 1, wait=0)
        await world.sample(session_id="s-2")
        (busy,) = engines(world)
        busy.seconds = 10.0
        at_work = asyncio.create_task(world.sample(session_id="s-2"))
        await asyncio.sleep(0.1)
        asked = asyncio.create_task(world.sample())
        await asyncio.sleep(5)
        assert states(world) == {"queued": 2} and len(world.running()) == 1
        assert "a place on group d0 or d1" in world.sampler().explain()
        await at_work
        assert await asked != "worker_start_failed"
        await until(lambda: states(world) == {"ready": 2})

    world.run(scenario())


def test_samples_that_wait_for_the_devices_of_an_engine_go_to_one_that_has_nothing_to_do(new_world):
    world, alone = new_world(), new_world(1)
    answers, turn = [], asyncio.Event()

    @asynccontextmanager
    async def waits_for_its_turn(_key: str):
        await turn.wait()
        yield

    async def scenario():
        first, second = await serving(world)
        sleeper = next(e for e in world.sampler().engines if e.process == second.spec.worker_id)
        calls = SimpleNamespace(waiting=[asyncio.Future()])
        roster = SimpleNamespace(rows=world.supervisor.roster.rows, calls_of=lambda _key: calls)
        sleeper.supervisor = SimpleNamespace(
            roster=roster, use=waits_for_its_turn, release=world.supervisor.release
        )
        answers.extend(await many(world))
        assert len(first.answered) == 40 and not second.answered
        sleeper.supervisor = world.supervisor

    async def undisturbed():
        assert await by_one(alone, number=40) == answers

    world.run(scenario())
    alone.run(undisturbed())


@pytest.mark.parametrize("replicas", [1, 2])
def test_samples_that_come_while_rows_are_written_hear_why_they_were_not(new_world, replicas):
    world = new_world(replicas)

    async def scenario():
        await world.open()
        world.table.commit_seconds, world.table.failing = 5.0, 1
        samples = [asyncio.create_task(world.sample("base"))]
        await asyncio.sleep(1)
        samples.append(asyncio.create_task(world.sample("base")))
        assert await asyncio.gather(*samples) == ["storage_failed", "storage_failed"]
        world.table.commit_seconds = 0.0
        assert await world.sample("base") not in ("storage_failed", "worker_died")

    world.run(scenario())
