from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from gateway.sampling.balancer import Balancer, Work
from tandem.errors import WorkerStartFailed
from tandem.v1 import common_pb2, sampler_pb2


@dataclass(eq=False)
class Engine:
    process: str
    loaded: set[str] = field(default_factory=lambda: {"v1"})


class World:
    def __init__(self, engines: int, *, most: int = 0) -> None:
        self.engines = [Engine(f"engine-{number}") for number in range(engines)]
        self.balancer = Balancer(lambda _work: self.engines)
        self.balancer.most_samples = most
        self.under_way: list[tuple[Engine, Work]] = []

    async def give(self, work: Work) -> Engine:
        engine = await asyncio.wait_for(self.balancer.assign(work), 60)
        self.under_way.append((engine, work))
        return engine

    def end_all(self) -> None:
        while self.under_way:
            self.balancer.end(*self.under_way.pop())


def work(prompt=(), *, version: str = "v1", samples: int = 1, tokens: int = 100) -> Work:
    """A request with this prompt, or with a unique one."""
    prompt = list(prompt) or [random.randrange(2**30) for _ in range(64)]
    request = sampler_pb2.SampleRequest(
        version=common_pb2.WeightVersion(name=version),
        prompt_tokens=np.array(prompt, "<i4").tobytes(),
        num_samples=samples,
        params=sampler_pb2.SamplingParams(max_tokens=tokens, temperature=1.0),
    )
    return Work.of_request(request, beginnings=True)


PROMPT = tuple(range(1000, 1100))


async def test_requests_that_have_nothing_in_common_are_spread_evenly():
    world = World(3)
    given = Counter([(await world.give(work())).process for _ in range(30)])
    assert given == {"engine-0": 10, "engine-1": 10, "engine-2": 10}


async def test_load_is_counted_in_tokens_and_not_in_requests():
    world = World(2)
    large = await world.give(work(samples=8))
    given = {(await world.give(work())).process for _ in range(5)}
    assert given == {each.process for each in world.engines if each is not large}


async def test_samples_of_one_prompt_go_to_one_engine():
    world = World(4)
    assert len({(await world.give(work(PROMPT))).process for _ in range(8)}) == 1


async def test_the_next_turn_of_a_conversation_goes_where_the_one_before_was():
    world = World(4)
    first = await world.give(work(PROMPT))
    await world.give(work())
    await world.give(work())
    assert await world.give(work((*PROMPT, *range(500)))) is first
    world.end_all()
    assert await world.give(work((*PROMPT, *range(500)))) is first, "when nothing is under way"


async def test_of_two_engines_the_one_with_more_of_the_prompt_has_it():
    world = World(2)
    first = await world.give(work(PROMPT[:32]))
    second = await world.give(work())
    assert second is not first
    world.balancer._note(work(PROMPT), second)
    assert await world.give(work(PROMPT)) is second


async def test_a_prompt_that_everybody_wants_is_computed_by_others_when_its_engine_is_much_busier():
    world = World(2)
    given = Counter([(await world.give(work(PROMPT))).process for _ in range(200)])
    assert min(given.values()) > 80


async def test_what_one_version_has_computed_says_nothing_of_another():
    world = World(2)
    for engine in world.engines:
        engine.loaded = {"v1", "v2"}
    first = await world.give(work(PROMPT))
    assert await world.give(work(PROMPT, version="v2")) is not first


async def test_an_engine_that_was_replaced_has_computed_nothing():
    world = World(2)
    first = await world.give(work(PROMPT))
    world.end_all()
    first.process = "the next one"
    busy = [e for e in world.engines if e is not first]
    with world.balancer.under_way(first, work()):
        assert await world.give(work(PROMPT)) is busy[0]


async def test_a_request_goes_to_an_engine_that_has_its_version():
    world = World(3)
    world.engines[1].loaded = {"v2"}
    assert {(await world.give(work(version="v2"))).process for _ in range(8)} == {"engine-1"}
    assert "engine-1" not in {(await world.give(work())).process for _ in range(8)}


async def test_a_version_that_no_engine_has_is_loaded_by_one():
    world = World(3)
    await world.give(work())
    given = {(await world.give(work(version="v2"))).process for _ in range(8)}
    assert len(given) == 1 and given != {world.under_way[0][0].process}


async def test_an_engine_with_nothing_to_do_loads_a_version_whose_engines_are_much_busier():
    world = World(2)
    world.engines[1].loaded = {"v2"}
    given = Counter([(await world.give(work())).process for _ in range(100)])
    assert given["engine-0"] > 0 and given["engine-1"] > 30


async def test_an_engine_that_works_on_another_version_is_not_made_to_change():
    world = World(2)
    world.engines[1].loaded = {"v2"}
    await world.give(work(version="v2"))
    assert {(await world.give(work())).process for _ in range(100)} == {"engine-0"}


async def test_requests_wait_while_no_engine_has_room_and_are_given_in_order():
    world = World(2, most=4)
    for _ in range(8):
        await world.give(work())
    waiting = [asyncio.create_task(world.give(work())) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    ended = world.under_way.pop(3)
    world.balancer.end(*ended)
    assert await asyncio.wait_for(waiting[0], 60) is ended[0]
    assert not waiting[1].done()
    waiting[1].cancel()
    await asyncio.gather(waiting[1], return_exceptions=True)
    world.balancer.end(*world.under_way.pop(0))
    await asyncio.wait_for(waiting[2], 60)


async def test_an_engine_that_begins_to_serve_gets_what_waits():
    world = World(1, most=2)
    for _ in range(2):
        await world.give(work())
    waiting = asyncio.create_task(world.give(work()))
    await asyncio.sleep(0)
    world.engines.append(Engine("late"))
    world.balancer.assign_waiting()
    assert (await asyncio.wait_for(waiting, 60)).process == "late"


async def test_a_request_that_is_larger_than_the_room_of_an_engine_is_served_all_the_same():
    world = World(2, most=4)
    await world.give(work(samples=100))
    await world.give(work(samples=100))


async def test_one_version_that_waits_keeps_no_other_from_its_engine():
    world = World(2, most=1)
    world.engines[1].loaded = {"v2"}
    await world.give(work())
    with world.balancer.under_way(world.engines[1], work(version="v2", samples=0)):
        waiting = asyncio.create_task(world.give(work()))
        await asyncio.sleep(0)
        assert (await world.give(work(version="v2"))).process == "engine-1"
        assert not waiting.done()
        waiting.cancel()


async def test_a_version_gets_its_turn_though_requests_for_another_one_never_end():
    world = World(2, most=1)
    for _ in range(2):
        await world.give(work())
    waiting = [asyncio.create_task(world.give(work())) for _ in range(2)]
    await asyncio.sleep(0)
    load = asyncio.create_task(world.give(work(version="v2", samples=0)))
    await asyncio.sleep(0)
    for _ in range(3):
        waiting.append(asyncio.create_task(world.give(work())))
        await asyncio.sleep(0)
        world.balancer.end(*world.under_way.pop(0))
        await asyncio.wait_for(waiting.pop(0), 60)
    assert load.done(), "two came before it, and more after it"
    waiting[0].cancel()
    waiting[1].cancel()


async def test_what_waits_fails_with_the_error_of_the_last_engine():
    world = World(0)
    waiting = asyncio.create_task(world.balancer.assign(work()))
    await asyncio.sleep(0)
    world.balancer.fail(WorkerStartFailed("there is no vLLM"))
    with pytest.raises(WorkerStartFailed, match="no vLLM"):
        await waiting


async def test_nothing_is_counted_any_more_when_all_has_ended_however_it_ended():
    world = World(3, most=6)
    rng = random.Random(1)
    tasks = [asyncio.create_task(world.give(work(samples=rng.randint(1, 4)))) for _ in range(200)]
    for _ in range(400):
        await asyncio.sleep(0)
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
        elif world.under_way:
            world.balancer.end(*world.under_way.pop(rng.randrange(len(world.under_way))))
        assert all(world.balancer.load_of(engine).samples <= 6 + 3 for engine in world.engines)
    while not all(task.done() for task in tasks) or world.under_way:
        await asyncio.sleep(0)
        world.end_all()
    assert not world.balancer._loads and not world.balancer._waiting
