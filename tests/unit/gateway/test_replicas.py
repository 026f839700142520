"""Several engines that serve one sampler, as a model and in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from gateway.checkpoints.versions import WeightVersion
from tests.support.gateway.model_workers import ModelSampler
from tests.support.gateway.sampler_world import World
from tests.support.waiting import until


@pytest.fixture
def new_world(tmp_path):
    return lambda replicas=2, **settings: World(tmp_path, settings, replicas=replicas)


def engines(world: World) -> list[ModelSampler]:
    return [world.host.workers[name] for name in world.running()]


async def serving(world: World, replicas: int = 2) -> list[ModelSampler]:
    """Have that many engines that serve, each of whose samples takes a second."""
    await world.open()
    world.sampler().start()
    await until(lambda: sum(each.serves for each in world.sampler().engines) >= replicas)
    for engine in engines(world):
        engine.seconds = 1.0
    return engines(world)


def saved(world: World, name: str) -> WeightVersion:
    version = world.version(name)
    return WeightVersion(
        name=version.name, path=version.path, run_id="s-1:train:0", step=1, base_model="tiny"
    )


async def many(world: World, *, version: str = "v1", number: int = 40) -> list[str]:
    asked = (world.sample(version, prompt=bytes([n]) * 128) for n in range(number))
    return list(await asyncio.gather(*asked))


def test_two_engines_share_the_samples_and_answer_as_one_would(new_world):
    world, alone = new_world(), new_world(1)
    answers = []

    async def scenario():
        first, second = await serving(world)
        answers.extend(await many(world))
        assert min(len(first.answered), len(second.answered)) >= 15

    async def by_one():
        await serving(alone, 1)
        assert await many(alone) == answers

    world.run(scenario())
    alone.run(by_one())


def test_a_load_reaches_all_engines_before_it_ends(new_world):
    world = new_world()

    async def scenario():
        first, second = await serving(world)
        await many(world)
        await world.sampler().load(saved(world, "v2"))
        assert first.version.name == second.version.name == "s-1:train:0/v2"
        await many(world, version="v2")
        assert {"s-1:train:0/v2"} < {*first.answered} == {*second.answered}

    world.run(scenario())


def test_samples_of_the_version_before_end_with_it_on_their_engine(new_world):
    world = new_world()

    async def scenario():
        await serving(world)
        before = asyncio.create_task(many(world))
        await asyncio.sleep(0.5)
        await world.sampler().load(saved(world, "v2"))
        after = await many(world, version="v2")
        assert before.done()
        assert not {*before.result()} & {*after}

    world.run(scenario())


@pytest.mark.parametrize("wait", [0.2, 0.5, 1.0])
def test_an_engine_that_is_killed_loses_no_sample_and_its_samples_go_to_the_other_one(
    new_world, wait
):
    world, alone = new_world(), new_world(1)
    answers = []

    async def scenario():
        await serving(world)
        asked = asyncio.create_task(many(world))
        await asyncio.sleep(wait)
        world.host.kill(world.running()[0])
        answers.extend(await asked)

    async def undisturbed():
        await serving(alone, 1)
        assert await many(alone) == answers

    world.run(scenario())
    alone.run(undisturbed())


@pytest.mark.parametrize(("in_flight", "drawn_from"), [(True, "v2"), (False, "v1")])
def test_what_is_in_flight_when_its_engine_is_killed_is_drawn_from_the_newest_version(
    new_world, in_flight, drawn_from
):
    world = new_world(1)

    async def scenario():
        (engine,) = await serving(world, 1)
        asked = asyncio.create_task(world.sample("v1", in_flight=in_flight))
        await asyncio.sleep(0.5)
        await world.sampler().load(saved(world, "v2"), in_flight=True)
        assert not asked.done(), "the load did not wait for it"
        world.host.kill(engine.spec.worker_id)
        assert await asked == await world.sample(drawn_from)

    world.run(scenario())


def test_an_engine_that_was_killed_is_started_again_while_there_is_work(new_world):
    world = new_world()

    async def scenario():
        before = {engine.spec.worker_id for engine in await serving(world)}
        asked = asyncio.create_task(many(world))
        await asyncio.sleep(0.5)
        killed = world.host.workers[min(before)]
        world.host.kill(killed.spec.worker_id)
        await asked
        await many(world)
        now = {engine.spec.worker_id: engine.spec.replica for engine in engines(world)}
        assert len(now) == 2 and killed.spec.worker_id not in now
        assert sorted(now.values()) == [0, 1]

    world.run(scenario())


def test_samples_go_on_when_a_replica_cannot_load_and_are_of_the_version_they_name(new_world):
    world = new_world()

    async def scenario():
        first, second = await serving(world)
        world.host.kill(second.spec.worker_id)
        load = asyncio.create_task(world.sampler().load(saved(world, "v2")))
        answers = await many(world, version="v2")
        await load
        assert len({*answers}) == len(answers)
        assert first.version.name == "s-1:train:0/v2"
        assert {*first.answered} == {"s-1:train:0/v2"}

    world.run(scenario())


def test_each_engine_is_adopted_as_the_one_that_it_was(new_world):
    world = new_world()

    async def scenario():
        world.left("sampler-s-1-0", replica=1).version = world.version("v2")
        world.left("sampler-s-1-1", replica=0)
        world.left("sampler-s-1-2", replica=2)
        await world.open()
        first, second = world.sampler().engines
        assert (first.process, second.process) == ("sampler-s-1-1", "sampler-s-1-0")
        assert (first.weights, second.weights) == ("base/tiny", "s-1:train:0/v2")
        assert world.running() == ["sampler-s-1-0", "sampler-s-1-1"], (
            "a third one was not asked for"
        )

    world.run(scenario())


def test_an_engine_that_cannot_start_keeps_none_from_the_other_one(new_world):
    world = new_world(max_engines=1, engine_quantum=0)

    async def scenario():
        await serving(world, 1)
        assert len({*await many(world)}) == 40
        status = Counter(engine.state for engine in world.sampler().engines)
        assert status == {"ready": 1, "queued": 1}
        assert world.sampler().explain() == "1 of 2 engines of the sampler are at work"

    world.run(scenario())
