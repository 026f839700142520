"""Several model engines serve one sampler, in virtual time."""

from __future__ import annotations

import asyncio
import gc

import pytest

from tandem.errors import WorkerDied
from tandem.v1 import sampler_pb2
from tests.support.gateway.model_workers import ModelSampler
from tests.support.gateway.replica_world import (
    engines,
    many,
    saved,
    serving,
    states,
)
from tests.support.waiting import until


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


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_sampler_says_was_lost_with_its_engine_is_asked_of_another_one(new_world, replicas):
    world, alone = new_world(replicas), new_world(1)
    answers = []

    async def scenario():
        first = (await serving(world, replicas))[0]
        asked = asyncio.create_task(many(world))
        await asyncio.sleep(0.5)
        first.failed = True
        answers.extend(await asked)
        now = engines(world)[0]
        assert now is not first
        now.failed = True
        await world.sampler().load(saved(world, "v2"))
        await until(lambda: now not in engines(world))
        assert "s-1:train:0/v2" in [each.version.name for each in engines(world)]

    async def undisturbed():
        await serving(alone, 1)
        assert await many(alone) == answers

    world.run(scenario())
    alone.run(undisturbed())


def test_a_request_at_which_engines_fail_ends_with_the_second_one(new_world, monkeypatch):
    world = new_world(1)

    async def scenario():
        (first,) = await serving(world, 1)
        monkeypatch.setattr(ModelSampler, "failed", True)
        assert await world.sample() == "worker_died"
        (second,) = engines(world)
        assert second is not first
        with pytest.raises(WorkerDied, match="died twice during a load: the engine failed"):
            await world.sampler().load(saved(world, "v2"))

    world.run(scenario())


@pytest.mark.parametrize(
    ("in_flight", "updates", "led", "drawn_from"),
    [
        (True, "DEFAULT", True, "v2"),
        (False, "DEFAULT", True, "v1"),
        (True, "DEFAULT", False, "v1"),
        (True, "KEEP", False, "v2"),
        (True, "ABORT", False, "v2"),
    ],
)
def test_what_is_in_flight_when_its_engine_is_killed_is_drawn_from_the_newest_version(
    new_world, in_flight, updates, led, drawn_from
):
    world = new_world(1)

    async def scenario():
        (engine,) = await serving(world, 1)
        updates_as = sampler_pb2.Updates.Value(f"UPDATES_{updates}")
        asked = asyncio.create_task(world.sample("v1", in_flight=in_flight, updates=updates_as))
        await asyncio.sleep(0.5)

        async def load_at_once(request):
            return sampler_pb2.LoadReply(version=request.version)

        engine.Load = load_at_once
        await world.sampler().load(saved(world, "v2"), in_flight=led)
        assert not asked.done(), "the load did not wait for it"
        world.host.kill(engine.spec.worker_id)
        assert await asked == await world.sample(drawn_from)

    world.run(scenario())


@pytest.mark.parametrize("in_flight", [True, False])
def test_only_an_in_flight_load_overtakes_samples_that_wait_for_room(new_world, in_flight):
    world = new_world(sampler={"max_num_seqs": 2})

    async def scenario():
        await serving(world)
        asked = [asyncio.create_task(world.sample("v1", in_flight=True)) for _ in range(12)]
        await asyncio.sleep(0.5)
        await world.sampler().load(saved(world, "v2"), in_flight=in_flight)
        assert sum(each.done() for each in asked) == (0 if in_flight else 12)
        await asyncio.gather(*asked)

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
        del world.table.rows["s-1/tiny/0#2"]
        await world.open()
        first, second = world.sampler().engines
        assert (first.process, second.process) == ("sampler-s-1-1", "sampler-s-1-0")
        assert (first.weights, second.weights) == ("base/tiny", "s-1:train:0/v2")
        assert world.running() == ["sampler-s-1-0", "sampler-s-1-1"], "the third has no place"

    world.run(scenario())


def test_the_next_gateway_goes_on_with_what_was_asked_for(new_world):
    world = new_world(1)

    async def scenario():
        world.left("sampler-s-1-8", replica=0)
        world.left("sampler-s-1-9", replica=2)
        await world.open()
        await until(lambda: states(world) == {"ready": 2})
        replicas = sorted(engine.spec.replica for engine in engines(world))
        assert replicas == [0, 1], "one ends that is too many, and one starts that is not there"

    world.run(scenario())


def test_an_engine_that_answers_again_while_it_is_prepared_is_prepared_twice(new_world):
    world, faults = new_world(), []

    async def scenario():
        asyncio.get_running_loop().set_exception_handler(lambda _, about: faults.append(about))
        await serving(world)
        replicas = world.sampler().replicas
        goes_on = asyncio.Event()

        async def prepare(_engine) -> None:
            await goes_on.wait()

        replicas.prepare = prepare
        for _ in range(2):
            replicas.engines[1].on_change(None)
            await asyncio.sleep(0)
        assert replicas.serving() == replicas.engines[:1]
        goes_on.set()
        await asyncio.sleep(0.1)
        gc.collect()
        assert replicas.serving() == replicas.engines and not faults

    world.run(scenario())
