"""Versions that some of a sampler's model engines refuse, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gateway.checkpoints.versions import WeightVersion
from gateway.workers.launchers.base import WorkerHandle
from tandem.errors import InvalidRequest, LoadFailed, OperationTimedOut, WorkerDied
from tandem.protocol.worker import WorkerSpec
from tandem.v1 import sampler_pb2
from tests.support.gateway.model_workers import ModelSampler
from tests.support.gateway.sampler_world import LOAD_TIMEOUT, TURNS, WHOLE_MACHINE, World
from tests.support.virtual_time import now
from tests.support.waiting import until

V2 = "s-1:train:0/v2"


class Refusals:
    """Loads and samples of versions that an engine refuses. A silent one waits for `answers`."""

    def __init__(self, engine: ModelSampler) -> None:
        self.versions: set[str] = set()
        self.silent = False
        self.answers = asyncio.Event()
        self.refusals = 0
        self.sampled: set[str] = set()
        self._load, self._sample = engine.Load, engine.Sample
        engine.Load, engine.Sample = self.load, self.sample  # type: ignore[method-assign]

    async def load(self, request: sampler_pb2.LoadRequest) -> sampler_pb2.LoadReply:
        if request.version.name in self.versions and self.silent:
            await self.answers.wait()
        if request.version.name in self.versions:
            return sampler_pb2.LoadReply(failure=LoadFailed("a tensor is missing").to_failure())
        return await self._load(request)

    async def sample(self, request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleReply:
        self.sampled.add(request.version.name)
        if request.version.name in self.versions:
            self.refusals += 1  # a sample that comes again and again must end
            error = WorkerDied if self.refusals > 100 else LoadFailed
            failure = error("a tensor is missing").to_failure()
            return sampler_pb2.SampleReply(failure=failure)
        return await self._sample(request)


@pytest.fixture
def new_world(tmp_path):
    def new(replicas: int = 2, groups=WHOLE_MACHINE, **settings) -> World:
        return World(tmp_path, settings, replicas=replicas, groups=groups)

    return new


async def serving(world: World, replicas: int = 2) -> list[Refusals]:
    await world.open()
    world.sampler().start()
    await until(lambda: sum(each.serves for each in world.sampler().engines) >= replicas)
    return [watched(world, number) for number in range(replicas)]


def watched(world: World, number: int) -> Refusals:
    process = world.host.workers[world.sampler().engines[number].process]
    process.seconds = 1.0
    return Refusals(process)


def saved(world: World, name: str = "v2") -> WeightVersion:
    version = world.version(name)
    return WeightVersion(
        name=version.name, path=version.path, run_id="s-1:train:0", step=1, base_model="tiny"
    )


async def many(world: World, version: str = "v2", *, number: int = 40) -> set[str]:
    asked = (world.sample(version, prompt=bytes([n]) * 128) for n in range(number))
    return {*await asyncio.gather(*asked)}


def state(world: World) -> str:
    return world.sampler().replicas.state_of(V2)


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
