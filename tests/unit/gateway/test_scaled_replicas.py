"""The number of a sampler's engines changes while it serves, in virtual time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from unittest.mock import patch

import pytest

from tandem.errors import InvalidRequest, NoRoom
from tests.support.gateway.replica_world import (
    DEVICES,
    by_one,
    engines,
    many,
    saved,
    scale,
    serving,
    states,
)
from tests.support.gateway.sampler_world import TURNS
from tests.support.waiting import until


def test_an_engine_that_is_added_has_the_version_before_its_first_request(new_world):
    world = new_world(1)

    async def scenario():
        (first,) = await serving(world, 1)
        await many(world, version="v2")
        busy = asyncio.create_task(many(world, version="v2"))
        await scale(world, 2)
        await until(lambda: states(world) == {"ready": 2})
        second = next(engine for engine in engines(world) if engine is not first)
        second.seconds = 1.0
        await until(lambda: second.version.name == first.version.name)
        assert not second.answered
        await busy
        await many(world, version="v2")
        assert len(second.answered) >= 15

    world.run(scenario())


def test_what_one_engine_was_sent_too_much_goes_to_the_one_that_is_added(new_world):
    world, alone = new_world(1, sampler={"max_num_seqs": 8}), new_world(1)
    answers = []

    async def scenario():
        (first,) = await serving(world, 1)
        first.seconds = 100.0
        asked = asyncio.create_task(many(world))
        await asyncio.sleep(1)
        await scale(world, 2)
        answers.extend(await asked)
        second = next(engine for engine in engines(world) if engine is not first)
        assert len(second.answered) == 32, "the first can have begun 8"

    async def undisturbed():
        assert await by_one(alone, number=40) == answers

    world.run(scenario())
    alone.run(undisturbed())


def test_an_engine_that_leaves_ends_what_it_has_and_gets_nothing_new(new_world):
    world = new_world()

    async def scenario():
        first, second = await serving(world)
        first.seconds = second.seconds = 50.0
        asked = asyncio.create_task(many(world))
        await asyncio.sleep(1)
        await scale(world, 1)
        assert len(world.sampler().replicas.leaving) == 1 and len(world.running()) == 2
        await many(world)
        await asked
        await until(lambda: len(world.running()) == 1)
        assert 15 <= len(second.answered) <= 25
        assert not world.sampler().replicas.leaving
        assert len(world.supervisor.roster.rows) == 1

    world.run(scenario())


def test_an_engine_that_does_not_end_what_it_has_loses_it_to_the_others(new_world):
    world, alone = new_world(), new_world(1)
    answers = []

    async def scenario():
        _, second = await serving(world)
        second.seconds = 5000.0
        asked = asyncio.create_task(many(world))
        await asyncio.sleep(1)
        await scale(world, 1)
        async with asyncio.timeout(400):
            answers.extend(await asked)
            await until(lambda: len(world.running()) == 1)

    async def undisturbed():
        assert await by_one(alone, number=40) == answers

    world.run(scenario())
    alone.run(undisturbed())


def test_an_engine_that_dies_while_it_leaves_is_not_started_again(new_world):
    world = new_world()

    async def scenario():
        _, second = await serving(world)
        second.seconds = 50.0
        asked = asyncio.create_task(many(world))
        await asyncio.sleep(1)
        await scale(world, 1)
        (leaving,) = world.sampler().replicas.leaving
        with patch.object(leaving, "start") as start:
            world.host.kill(leaving.process)
            await asked
            await until(lambda: len(world.supervisor.roster.rows) == 1)
        start.assert_not_called()

    world.run(scenario())


def test_an_engine_that_is_wanted_again_while_it_leaves_stays(new_world):
    world = new_world()

    async def scenario():
        for engine in await serving(world):
            engine.seconds = 50.0
        before = world.running()
        asked = asyncio.create_task(many(world))
        await asyncio.sleep(1)
        await scale(world, 1)
        await scale(world, 2)
        await asked
        await many(world)
        assert world.running() == before and states(world) == {"ready": 2}

    world.run(scenario())


def test_a_load_does_not_wait_for_the_devices_of_an_engine_that_leaves(new_world):
    small, large = (replace(TURNS[0], name=f"d{n}", workers=n) for n in (1, 2))
    world = new_world(groups=(small, large))

    async def scenario():
        await serving(world)
        first, second = world.sampler().engines
        other = world.sampler("s-2")
        await world.router.scale(other, 1, wait=0)
        await world.sample(session_id="s-2")
        world.host.workers[other.engine.process].seconds = 5000.0
        busy = asyncio.create_task(world.sample(session_id="s-2"))
        await until(lambda: second.row.state == "asleep")
        load = asyncio.create_task(world.sampler().load(saved(world, "v2")))
        await until(lambda: second.waits_for_devices)
        await scale(world, 1)
        async with asyncio.timeout(10):
            await load
        assert first.weights == "s-1:train:0/v2" and not busy.done()

    world.run(scenario())


def test_engines_are_added_all_or_none_and_the_refusal_says_how_many_there_is_room_for(new_world):
    world = new_world(1, groups=DEVICES)

    async def scenario():
        await serving(world, 1)
        await world.sample(session_id="s-2")
        with pytest.raises(NoRoom, match="and there is room for 1: "):
            await scale(world, 3)
        assert len(world.running()) == 2 and states(world) == {"ready": 1}
        with pytest.raises(InvalidRequest, match="there can be no place for it"):
            await scale(world, 4)
        await scale(world, 2)
        await until(lambda: states(world) == {"ready": 2})
        await scale(world, 2)
        assert len(world.running()) == 3
        assert sum(bool(row.group) for row in world.supervisor.roster.rows.values()) == 3

    world.run(scenario())


def test_engines_that_have_nothing_to_do_end_for_those_that_are_added(new_world):
    world = new_world(1, groups=DEVICES, engine_quantum=0)

    async def scenario():
        await serving(world, 1)
        await world.sample(session_id="s-2")
        await scale(world, 3)
        await until(lambda: states(world) == {"ready": 3})
        assert len(world.running()) == 3

    world.run(scenario())


@pytest.mark.parametrize("seed", range(12))
def test_however_it_is_scaled_while_engines_die_no_sample_is_lost_or_another_one(new_world, seed):
    world, alone = new_world(1, sampler={"max_num_seqs": 8}), new_world(1)
    answers, rng = [], random.Random(seed)

    async def scenario():
        await serving(world, 1)
        asked = asyncio.create_task(many(world, number=80))
        killed = 0
        while not asked.done():
            await asyncio.sleep(rng.random() * 3)
            for engine in engines(world):
                engine.seconds = rng.random() * 20
            if killed < 1 and rng.random() < 0.2:
                killed += 1
                world.host.kill(rng.choice(world.running()))
            else:
                await scale(world, rng.randint(1, 4))
        answers.extend(await asked)

    async def undisturbed():
        assert await by_one(alone, number=80) == answers

    world.run(scenario())
    alone.run(undisturbed())
