"""Samplers with several model engines, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter

from gateway.checkpoints.versions import WeightVersion
from gateway.workers.groups import WorkerGroup
from tests.support.gateway.model_workers import ModelSampler
from tests.support.gateway.sampler_world import World
from tests.support.waiting import until

DEVICES = tuple(
    WorkerGroup(
        name=f"d{number}",
        kinds=frozenset({"trainer", "engine"}),
        devices=(f"cpu:{number}",),
        on_host=True,
        awake=0,
        workers=1,
    )
    for number in range(3)
)


def engines(world: World) -> list[ModelSampler]:
    return [world.host.workers[name] for name in world.running()]


async def serving(world: World, replicas: int = 2) -> list[ModelSampler]:
    """Start engines. Each of their samples takes a second."""
    await world.open()
    world.sampler().start()
    await until(lambda: sum(each.serves for each in world.sampler().engines) >= replicas)
    for engine in engines(world):
        engine.seconds = 1.0
    return engines(world)


def saved(world: World, name: str = "v2") -> WeightVersion:
    version = world.version(name)
    return WeightVersion(
        name=version.name, path=version.path, run_id="s-1:train:0", step=1, base_model="tiny"
    )


async def many(world: World, *, version: str = "v1", number: int = 40) -> list[str]:
    asked = (world.sample(version, prompt=bytes([n]) * 128) for n in range(number))
    return list(await asyncio.gather(*asked))


async def scale(world: World, replicas: int, *, wait: float = 0.0) -> None:
    await world.router.scale(world.sampler(), replicas, wait=wait)


def states(world: World) -> dict[str, int]:
    return Counter(engine.state for engine in world.sampler().engines)


async def by_one(world: World, *, number: int) -> list[str]:
    await serving(world, 1)
    return await many(world, number=number)
