"""The number of a sampler's engines follows its queue, in virtual time."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from gateway.sampling.autoscaling import (
    DOWN_AFTER,
    REST_AFTER,
    UP_AFTER,
    Autoscaler,
    Reading,
    wanted_engines,
)
from gateway.sampling.replicas import ReplicaRange
from tandem.errors import InvalidRequest
from tests.support.gateway.model_workers import ModelSampler
from tests.support.gateway.replica_world import DEVICES, serving
from tests.support.gateway.sampler_world import World

INTERVAL = 2.0


def followed(demand, *, seconds: float, allowed: ReplicaRange, engines: int = 1) -> list[int]:
    """Return the number of engines at each reading of a demand over time."""
    readings: list[Reading] = []
    numbers = []
    for step in range(int(seconds / INTERVAL)):
        now = step * INTERVAL
        readings = [*readings[-int(REST_AFTER / INTERVAL) - 1 :], Reading(now, demand(now))]
        engines = wanted_engines(readings, engines=engines, allowed=allowed, now=now)
        numbers.append(engines)
    return numbers


def changes(numbers: list[int]) -> list[int]:
    return [after for before, after in pairwise([-1, *numbers]) if before != after]


def test_a_demand_that_rises_and_ends_is_followed_up_down_and_to_zero():
    def demand(now: float) -> int:
        return 1 if now < 100 else 3 if now < 400 else 1 if now < 1000 else 0

    numbers = followed(demand, seconds=2000, allowed=ReplicaRange(0, 3))
    assert changes(numbers) == [1, 3, 1, 0]
    times = {number: numbers.index(number) * INTERVAL for number in (3, 0)}
    assert 100 + UP_AFTER / 2 <= times[3] <= 100 + UP_AFTER
    assert 1000 + REST_AFTER <= times[0] <= 1000 + REST_AFTER + INTERVAL
    back = next(n for n in range(len(numbers)) if n * INTERVAL > 400 and numbers[n] == 1)
    assert 400 + DOWN_AFTER <= back * INTERVAL <= 400 + DOWN_AFTER + INTERVAL


@pytest.mark.parametrize("period", [4, 10, 30, 60, 120, 200])
@pytest.mark.parametrize("low", [0, 1])
def test_a_sawtooth_does_not_flap(period, low):
    numbers = followed(
        lambda now: 3 if now % period < period / 2 else low,
        seconds=7200,
        allowed=ReplicaRange(0, 3),
    )
    assert changes(numbers) in ([1], [1, 3])


@pytest.mark.parametrize("seed", range(20))
def test_any_demand_changes_the_number_seldom_and_within_its_range(seed):
    rng = random.Random(seed)
    demands = [rng.randint(0, 6) for _ in range(3600)]
    allowed = ReplicaRange(rng.randint(0, 2), rng.randint(2, 4))
    numbers = followed(lambda now: demands[int(now / INTERVAL)], seconds=7200, allowed=allowed)
    assert all(max(1, allowed.least) <= each <= allowed.most for each in numbers)
    downs = sum(after < before for before, after in pairwise(numbers))
    assert downs <= 7200 / DOWN_AFTER


def test_without_readings_of_the_whole_time_nothing_changes():
    busy, idle = [Reading(100.0, 3)], [Reading(100.0, 0)]
    allowed = ReplicaRange(0, 3)
    assert wanted_engines(busy, engines=1, allowed=allowed, now=100 + UP_AFTER - 1) == 1
    assert wanted_engines(busy, engines=1, allowed=allowed, now=100 + UP_AFTER) == 3
    assert wanted_engines(idle, engines=2, allowed=allowed, now=100 + DOWN_AFTER - 1) == 2
    assert wanted_engines(idle, engines=2, allowed=allowed, now=100 + DOWN_AFTER) == 1
    assert wanted_engines(idle, engines=1, allowed=allowed, now=100 + REST_AFTER) == 0


def test_a_range_bounds_the_number_at_once():
    assert wanted_engines([], engines=1, allowed=ReplicaRange(2, 3), now=0.0) == 2
    assert wanted_engines([], engines=4, allowed=ReplicaRange(2, 3), now=0.0) == 3
    assert wanted_engines([], engines=0, allowed=ReplicaRange(2, 3), now=0.0) == 0


# --- Of a sampler ---------------------------------------------------------------------------------


@pytest.fixture
def new_world(tmp_path, monkeypatch):
    begin = ModelSampler.__init__

    def begin_slowly(self, *args):
        begin(self, *args)
        self.seconds = 5.0

    monkeypatch.setattr(ModelSampler, "__init__", begin_slowly)

    def new(groups=DEVICES, **settings) -> World:
        return World(
            tmp_path, {"sampler": {"max_num_seqs": 8}} | settings, replicas=1, groups=groups
        )

    return new


@dataclass
class Load:
    """Keeps a `level` of unfinished samples at a sampler."""

    world: World
    level: int = 0
    answers: list[str] = field(default_factory=list)
    running: set[asyncio.Task[None]] = field(default_factory=set)

    async def hold(self, level: int, *, seconds: float) -> list[int]:
        """Return the numbers of engines meanwhile."""
        numbers = []
        self.level = level
        while len(self.running) < level:
            task = asyncio.create_task(self._sample(len(self.running)))
            self.running.add(task)
            task.add_done_callback(self.running.discard)
        for _ in range(int(seconds)):
            await asyncio.sleep(1)
            numbers.append(self.world.sampler().replicas.running)
        return numbers

    async def _sample(self, number: int) -> None:
        while number < self.level:
            self.answers.append(await self.world.sample())

    async def end(self) -> None:
        self.level = 0
        await asyncio.gather(*self.running)


@asynccontextmanager
async def autoscaled(world: World, allowed: ReplicaRange):
    await world.router.set_range(world.sampler(), allowed)
    task = asyncio.create_task(Autoscaler(world.router).follow_demand())
    try:
        yield Load(world)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_engines_follow_a_load_up_down_and_to_zero_without_a_lost_sample(new_world):
    world = new_world()

    async def scenario():
        await serving(world, 1)
        async with autoscaled(world, ReplicaRange(0, 3)) as load:
            numbers = await load.hold(4, seconds=60)
            assert {*numbers} == {1}
            numbers += await load.hold(24, seconds=200)
            assert numbers[-1] == 3
            numbers += await load.hold(4, seconds=400)
            assert numbers[-1] == 1
            numbers += await load.hold(0, seconds=800)
            assert changes(numbers) == [1, 3, 1, 0]
            assert not world.running() and not world.supervisor.roster.rows
            again = await load.hold(4, seconds=60)
            assert again[-1] == 1 and len(world.running()) == 1
            await load.end()
        assert len(load.answers) > 800
        assert not {each for each in load.answers if "_" in each}

    world.run(scenario())


def test_requests_that_come_while_the_last_engine_goes_start_another(new_world):
    world = new_world()

    async def scenario():
        await serving(world, 1)
        before = world.running()
        resting = asyncio.create_task(world.sampler().rest())
        await asyncio.sleep(0)
        assert not world.sampler().serves
        answers = await asyncio.gather(*(world.sample() for _ in range(20)))
        await resting
        assert not {each for each in answers if "_" in each}
        assert len(world.running()) == 1 and world.running() != before

    world.run(scenario())


def test_a_busy_engine_does_not_rest(new_world):
    world = new_world()

    async def scenario():
        await serving(world, 1)
        asked = asyncio.create_task(world.sample())
        await asyncio.sleep(0.5)
        await world.sampler().rest()
        assert world.sampler().serves and await asked

    world.run(scenario())


def test_without_room_the_present_engines_serve_and_more_come_when_there_is(new_world):
    world = new_world(groups=DEVICES[:2], sharing={"lora_runs": "never"})

    async def scenario():
        await serving(world, 1)
        await world.router.scale(world.sampler("s-2"), 1, wait=0)
        await world.sample(session_id="s-2")
        other = world.host.workers[world.sampler("s-2").engine.process]
        other.seconds = 5000.0
        busy = asyncio.create_task(world.sample(session_id="s-2"))
        async with autoscaled(world, ReplicaRange(1, 2)) as load:
            numbers = await load.hold(24, seconds=100)
            assert {*numbers} == {1} and not busy.done()
            await world.router.end_session("s-2", InvalidRequest("over"))
            numbers = await load.hold(24, seconds=60)
            assert numbers[-1] == 2
            await load.end()
        assert not {each for each in load.answers if "_" in each}

    world.run(scenario())


def test_a_session_names_the_range_in_its_metadata(new_world):
    world = new_world()
    about = world.sessions["s-1"].user_metadata
    about |= {"tandem.min_replicas": 2, "tandem.max_replicas": 3}

    async def scenario():
        await world.open()
        replicas = world.sampler().replicas
        assert replicas.allowed == ReplicaRange(2, 3) and len(replicas.engines) == 2
        await world.router.set_range(world.sampler(), None)
        world.router.allow(str(world.sampler().key), ReplicaRange(1, 2))  # a run joins
        assert replicas.allowed is None

    world.run(scenario())
