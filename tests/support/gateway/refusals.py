"""Model engines that refuse versions, or answer late."""

from __future__ import annotations

import asyncio

from tandem.errors import LoadFailed, WorkerDied
from tandem.v1 import sampler_pb2
from tests.support.gateway.model_workers import ModelSampler
from tests.support.gateway.sampler_world import World
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


async def serving(world: World, replicas: int = 2) -> list[Refusals]:
    await world.open()
    world.sampler().start()
    await until(lambda: sum(each.serves for each in world.sampler().engines) >= replicas)
    return [watched(world, number) for number in range(replicas)]


def watched(world: World, number: int) -> Refusals:
    process = world.host.workers[world.sampler().engines[number].process]
    process.seconds = 1.0
    return Refusals(process)


async def many(world: World, version: str = "v2", *, number: int = 40) -> set[str]:
    asked = (world.sample(version, prompt=bytes([n]) * 128) for n in range(number))
    return {*await asyncio.gather(*asked)}


def state(world: World) -> str:
    return world.sampler().replicas.state_of(V2)
