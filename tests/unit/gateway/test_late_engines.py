"""Model engines that answer a load late, die during it or come during it, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from gateway.workers.launchers.base import WorkerHandle
from tandem.errors import LoadFailed
from tandem.protocol.worker import WorkerSpec
from tandem.v1 import sampler_pb2
from tests.support.gateway.model_workers import ModelSampler
from tests.support.gateway.refusals import V2, many, serving, state, watched
from tests.support.gateway.replica_world import saved
from tests.support.gateway.sampler_world import LOAD_TIMEOUT
from tests.support.virtual_time import now
from tests.support.waiting import until


@pytest.mark.parametrize("number", [0, 1])
def test_a_load_that_waits_for_earlier_samples_is_no_refusal(new_world, number):
    world = new_world()

    async def scenario():
        await serving(world)
        await many(world, "v1")
        processes = [world.host.workers[each.process] for each in world.sampler().engines]
        processes[number].seconds = 1.5 * LOAD_TIMEOUT
        samples = asyncio.create_task(many(world, "v1"))
        await until(lambda: processes[number]._under_way > 0)
        began = now()
        await world.sampler().load(saved(world))
        assert now() - began > LOAD_TIMEOUT
        assert state(world) == "live"
        assert not {"operation_timed_out", "worker_died"} & await samples

    world.run(scenario())


def test_a_load_without_an_answer_is_refused_once_earlier_samples_ended(new_world):
    world = new_world()

    async def scenario():
        both = await serving(world)
        await many(world, "v1")
        process = world.host.workers[world.sampler().engines[1].process]
        process.seconds = 1.5 * LOAD_TIMEOUT
        earlier = asyncio.create_task(many(world, "v1"))
        await until(lambda: process._under_way > 0)
        process.seconds = 1.0
        both[1].versions, both[1].silent = {V2}, True
        began = now()
        loading = asyncio.create_task(world.sampler().load(saved(world)))
        while not loading.done():  # later samples do not put it off
            await many(world, "v1", number=4)
        assert 1.5 * LOAD_TIMEOUT < now() - began < 3 * LOAD_TIMEOUT
        assert state(world) == "degraded"
        await earlier

    world.run(scenario())


@pytest.mark.parametrize("number", [0, 1])
def test_a_version_is_live_when_the_late_engine_answers(new_world, number):
    world = new_world()

    async def scenario():
        late = (await serving(world))[number]
        late.versions, late.silent = {V2}, True
        await world.sampler().load(saved(world))
        await asyncio.sleep(2.5 * LOAD_TIMEOUT)
        assert state(world) == "degraded"
        late.versions = set()
        late.answers.set()
        await asyncio.sleep(5)
        assert state(world) == "live"
        await many(world)
        assert V2 in late.sampled

    world.run(scenario())


def test_a_sampler_forgets_the_load_of_a_late_engine_that_answered(new_world):
    world = new_world()

    async def scenario():
        _, second = await serving(world)
        second.versions, second.silent = {V2}, True
        await world.sampler().load(saved(world))
        await world.sampler().load(saved(world, "v3"))
        await world.sampler().load(saved(world))
        assert len(world.sampler()._late) == 1
        second.answers.set()
        await asyncio.sleep(2 * LOAD_TIMEOUT)
        assert not world.sampler()._late

    world.run(scenario())


def test_a_late_engine_that_refuses_a_version_says_why(new_world):
    world = new_world()

    async def scenario():
        _, second = await serving(world)
        second.versions, second.silent = {V2}, True
        await world.sampler().load(saved(world))
        second.answers.set()
        await asyncio.sleep(5)
        assert state(world) == "degraded"
        assert world.sampler().engines[1].refused == {V2: "a tensor is missing"}

    world.run(scenario())


def test_a_late_engine_loads_only_the_newest_version_of_a_run(new_world):
    world = new_world()

    async def scenario():
        _, second = await serving(world)
        second.versions, second.silent = {V2}, True
        await world.sampler().load(saved(world))
        await world.sampler().load(saved(world, "v3"))
        second.versions = set()
        second.answers.set()
        await asyncio.sleep(2 * LOAD_TIMEOUT)
        assert world.sampler().engines[1].weights == "s-1:train:0/v3"

    world.run(scenario())


def test_an_engine_that_was_silent_loads_the_newest_version_when_it_answers(new_world):
    world = new_world()

    async def scenario():
        await serving(world)
        engine = world.sampler().engines[1]
        process = world.host.workers[engine.process]
        process.frozen = True
        await until(lambda: engine.silence)
        for name in ("v2", "v3"):
            await world.sampler().load(saved(world, name))
        process.frozen = False
        await asyncio.sleep(1.5 * LOAD_TIMEOUT)
        assert engine.weights == "s-1:train:0/v3" and not engine.refused
        assert world.host.workers[engine.process] is process

    world.run(scenario())


def test_an_engine_that_starts_again_loads_the_version_that_it_refused(new_world):
    world = new_world()

    async def scenario():
        _, second = await serving(world)
        second.versions = {V2}
        await world.sampler().load(saved(world))
        engine = world.sampler().engines[1]
        asked = asyncio.create_task(many(world))
        await asyncio.sleep(0.5)
        world.host.kill(engine.process)
        await asked
        await many(world)
        await until(lambda: state(world) == "live")
        again = watched(world, 1)
        await many(world)
        assert V2 in again.sampled and not engine.refused

    world.run(scenario())


@pytest.mark.parametrize("number", [0, 1])
def test_an_engine_that_dies_during_a_load_has_refused_nothing(new_world, number):
    world = new_world()

    async def scenario():
        both = await serving(world)
        dying, other = both[number], both[1 - number]
        for each in both:
            each.versions, each.silent = {V2}, True
        goes_on, start = asyncio.Event(), world.launcher.start

        async def start_later(spec: WorkerSpec) -> WorkerHandle:
            await goes_on.wait()
            return await start(spec)

        world.launcher.start = start_later
        loading = asyncio.create_task(world.sampler().load(saved(world)))
        await asyncio.sleep(1)
        engine = world.sampler().engines[number]
        world.host.workers[engine.process].die()
        await asyncio.sleep(1)  # the report of its end comes after the broken connection
        world.host.kill(engine.process)
        await until(lambda: not engine.process)
        other.versions = set()
        other.answers.set()
        await loading
        assert state(world) == "live" and not dying.sampled
        goes_on.set()
        await until(lambda: V2 in engine.loaded)
        assert state(world) == "live"

    world.run(scenario())


def test_an_added_engine_that_cannot_load_the_version_gets_no_sample_of_it(new_world, monkeypatch):
    world = new_world(1)

    async def scenario():
        await serving(world, 1)
        await world.sampler().load(saved(world))
        load = ModelSampler.Load

        async def refuse(self: ModelSampler, request: sampler_pb2.LoadRequest):
            if self.spec.replica == 1:
                failure = LoadFailed("a tensor is missing").to_failure()
                return sampler_pb2.LoadReply(failure=failure)
            return await load(self, request)

        monkeypatch.setattr(ModelSampler, "Load", refuse)
        await world.router.scale(world.sampler(), 2, wait=0)
        await until(lambda: bool(world.sampler().engines[1].refused))
        added = watched(world, 1)
        assert state(world) == "degraded"
        assert "load_failed" not in await many(world)
        assert not added.sampled
        await many(world, "base")
        assert added.sampled == {"base/tiny"}

    world.run(scenario())


def test_an_added_engine_that_dies_during_its_load_has_refused_nothing(new_world, monkeypatch):
    world = new_world(1)

    async def scenario():
        await serving(world, 1)
        await world.sampler().load(saved(world))
        load, dies = ModelSampler.Load, asyncio.Event()

        async def die_once(self: ModelSampler, request: sampler_pb2.LoadRequest):
            if self.spec.replica == 1 and not dies.is_set():
                dies.set()
                await asyncio.Event().wait()
            return await load(self, request)

        monkeypatch.setattr(ModelSampler, "Load", die_once)
        await world.router.scale(world.sampler(), 2, wait=0)
        await until(dies.is_set)
        added = world.sampler().engines[1]
        world.host.kill(added.process)
        await until(lambda: not added.process)
        await many(world)
        await until(lambda: V2 in added.loaded)
        assert state(world) == "live"

    world.run(scenario())


def test_an_engine_that_comes_during_a_load_has_the_version_when_it_is_live(new_world):
    world = new_world()

    async def scenario():
        first, _ = await serving(world)
        await many(world, "v1")
        goes_on, load = asyncio.Event(), first._load

        async def wait_and_load(request: sampler_pb2.LoadRequest) -> sampler_pb2.LoadReply:
            await goes_on.wait()
            return await load(request)

        first._load = wait_and_load
        loading = asyncio.create_task(world.sampler().load(saved(world)))
        await asyncio.sleep(1)
        await world.router.scale(world.sampler(), 3, wait=0)
        engines = world.sampler().engines
        await until(lambda: len(world.sampler().replicas.serving()) == 3)
        assert V2 not in engines[2].loaded and state(world) == "partial"
        goes_on.set()
        await loading
        assert V2 in engines[2].loaded and state(world) == "live"

    world.run(scenario())
