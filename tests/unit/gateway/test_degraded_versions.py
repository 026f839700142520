"""Versions that some of a sampler's model engines refuse, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tandem.errors import InvalidRequest, LoadFailed, OperationTimedOut
from tandem.v1 import sampler_pb2
from tests.support.gateway.refusals import V2, many, serving, state
from tests.support.gateway.replica_world import saved
from tests.support.gateway.sampler_world import LOAD_TIMEOUT, TURNS
from tests.support.virtual_time import now
from tests.support.waiting import until


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_an_engine_that_refuses_a_version_gets_no_sample_of_it(new_world, number, silent):
    world = new_world()

    async def scenario():
        both = await serving(world)
        await many(world, "v1")
        refusing, other = both[number], both[1 - number]
        refusing.versions, refusing.silent = {V2}, silent
        began = now()
        await world.sampler().load(saved(world))
        assert now() - began <= LOAD_TIMEOUT + 10
        assert state(world) == "degraded"
        refused = world.sampler().engines[number].refused
        expected = "did not load the weights within 1000 s" if silent else "a tensor is missing"
        assert expected in refused[V2] and not world.sampler().engines[1 - number].refused
        assert not {"load_failed", "worker_died"} & await many(world)
        assert V2 not in refusing.sampled and V2 in other.sampled
        refusing.sampled.clear()
        await many(world, "v1")
        assert refusing.sampled == {"s-1:train:0/v1"}, "it serves other versions"

    world.run(scenario())


def test_a_version_is_degraded_while_the_refusing_engine_is_silent(new_world):
    world = new_world()

    async def scenario():
        _, second = await serving(world)
        second.versions = {V2}
        await world.sampler().load(saved(world))
        engine = world.sampler().engines[1]
        world.host.workers[engine.process].frozen = True
        await until(lambda: engine.silence)
        assert state(world) == "degraded"

    world.run(scenario())


def test_unsent_samples_leave_an_engine_that_refuses_their_version(new_world):
    groups = [replace(TURNS[0], name=f"d{number}", workers=number) for number in (1, 2)]
    world = new_world(groups=groups)

    async def scenario():
        await serving(world)
        engine = world.sampler().engines[1]
        await world.router.scale(world.sampler("s-2"), 1, wait=0)
        await world.sample(session_id="s-2")
        world.host.workers[world.sampler("s-2").engine.process].seconds = 5000.0
        busy = asyncio.create_task(world.sample(session_id="s-2"))
        await until(lambda: engine.row.state == "asleep")
        asked = asyncio.create_task(many(world))
        await until(lambda: engine.waits_for_devices)
        world.sampler().calls.note_refused(engine, V2, "a tensor is missing")
        await asyncio.sleep(0.1)
        assert not engine.waits_for_devices
        assert "load_failed" not in await asked and not busy.done()

    world.run(scenario())


def test_a_version_that_all_engines_have_is_live_and_sampled_by_all(new_world):
    world = new_world()

    async def scenario():
        both = await serving(world)
        await world.sampler().load(saved(world))
        assert state(world) == "live"
        await many(world)
        assert all(V2 in each.sampled for each in both)

    world.run(scenario())


def test_without_an_engine_no_version_is_live(new_world):
    world = new_world()

    async def scenario():
        await world.open()
        assert world.sampler().replicas.state_of("base/tiny") == "partial"

    world.run(scenario())


def test_a_version_that_one_engine_has_is_not_live(new_world):
    world = new_world()

    async def scenario():
        await serving(world)
        await world.sample("v2")
        assert state(world) == "partial"

    world.run(scenario())


@pytest.mark.parametrize("number", [0, 1])
def test_samples_that_follow_a_degraded_version_go_to_the_engine_that_has_it(new_world, number):
    world = new_world(sampler={"max_num_seqs": 2})

    async def scenario():
        refusing = (await serving(world))[number]
        await many(world, "v1")
        asked = [asyncio.create_task(world.sample("v1", in_flight=True)) for _ in range(12)]
        await asyncio.sleep(0.5)
        refusing.versions = {V2}
        await world.sampler().load(saved(world), in_flight=True)
        assert state(world) == "degraded"
        assert not any(each.done() for each in asked), "the load did not wait for room"
        assert not {"load_failed", "worker_died"} & {*await asyncio.gather(*asked)}
        assert V2 not in refusing.sampled

    world.run(scenario())


def test_samples_that_follow_a_degraded_version_wait_for_the_dead_engine_that_had_it(new_world):
    world = new_world()

    async def scenario():
        both = await serving(world)
        await many(world, "v1")
        for process in world.host.workers.values():
            process.seconds = 50.0
        prompts = (bytes([number]) * 128 for number in range(4))
        asked = [
            asyncio.create_task(world.sample("v1", prompt=prompt, in_flight=True))
            for prompt in prompts
        ]
        await asyncio.sleep(0.5)
        both[1].versions = {V2}
        await world.sampler().load(saved(world), in_flight=True)
        assert state(world) == "degraded"
        world.host.kill(world.sampler().engines[0].process)
        assert not {"load_failed", "worker_died"} & {*await asyncio.gather(*asked)}
        assert V2 not in both[1].sampled

    world.run(scenario())


def test_a_version_that_all_engines_refuse_is_not_degraded_and_its_load_fails(new_world):
    world = new_world()

    async def scenario():
        both = await serving(world)
        for each in both:
            each.versions = {V2}
        with pytest.raises(LoadFailed, match="a tensor is missing"):
            await world.sampler().load(saved(world))
        for each in both:
            each.silent = True
        with pytest.raises(OperationTimedOut, match="did not load the weights"):
            await world.sampler().load(saved(world))
        assert state(world) == "partial"
        assert not any(engine.refused for engine in world.sampler().engines)

    world.run(scenario())


def test_samples_of_a_version_without_an_engine_fail_until_it_is_loaded_again(new_world):
    world = new_world()

    async def scenario():
        first, _ = await serving(world)
        first.versions = {V2}
        await world.sampler().load(saved(world))
        await world.router.scale(world.sampler(), 1, wait=0)
        async with asyncio.timeout(10):
            assert await many(world) == {"load_failed"}
            assert not first.sampled
            first.versions = set()
            await world.sampler().load(saved(world))
            assert "load_failed" not in await many(world)

    world.run(scenario())


def test_samples_of_a_degraded_version_wait_for_an_engine_without_a_place(new_world):
    world = new_world()

    async def scenario():
        _, second = await serving(world)
        second.versions = {V2}
        await world.sampler().load(saved(world))
        await world.sampler().engine.rest()
        assert "load_failed" not in await many(world)
        assert V2 not in second.sampled

    world.run(scenario())


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_sample_of_a_version_that_no_engine_has_fails_alone(new_world, replicas):
    world = new_world(replicas)

    async def scenario():
        found = await serving(world, replicas)
        for each in found:
            each.versions = {V2}
        assert await world.sample("v2") == "load_failed"
        assert not any(engine.refused for engine in world.sampler().engines)
        for each in found:
            each.versions = set()
        assert await world.sample("v2") != "load_failed"

    world.run(scenario())


def test_a_sample_that_fails_for_another_reason_leaves_its_version_live(new_world):
    world = new_world()

    async def fail(_request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleReply:
        return sampler_pb2.SampleReply(failure=InvalidRequest("too long").to_failure())

    async def scenario():
        for each in await serving(world):
            each._sample = fail
        await world.sampler().load(saved(world))
        assert await many(world, number=4) == {"invalid_request"}
        assert state(world) == "live"

    world.run(scenario())


def test_a_sample_whose_engine_cannot_load_the_version_goes_to_one_that_has_it(new_world):
    world = new_world()

    async def scenario():
        both = await serving(world)
        await many(world, "v1")
        await world.sample("v2")
        without = next(n for n in (0, 1) if V2 not in world.sampler().engines[n].loaded)
        both[without].versions = {V2}
        assert "load_failed" not in await many(world)
        assert world.sampler().engines[without].refused == {V2: "a tensor is missing"}

    world.run(scenario())


def test_a_later_load_makes_a_degraded_version_live(new_world):
    world = new_world()

    async def scenario():
        first, second = await serving(world)
        second.versions = {V2}
        await world.sampler().load(saved(world))
        await many(world)
        assert V2 not in second.sampled
        second.versions = set()
        await world.sampler().load(saved(world))
        assert state(world) == "live"
        await many(world)
        assert V2 in first.sampled & second.sampled

    world.run(scenario())
