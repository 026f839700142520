from __future__ import annotations

import asyncio

import pytest

from tandem.rl.concurrency import Concurrency
from tandem.rl.server import EngineLoad
from tests.support.virtual_time import in_virtual_time, now

IDLE = EngineLoad(waiting=0, kv_used=0.3)
FULL = EngineLoad(waiting=0, kv_used=0.95)
CROWDED = EngineLoad(waiting=3, kv_used=0.5)


async def occupied(concurrency: Concurrency, count: int) -> list[asyncio.Task[None]]:
    async def hold() -> None:
        async with concurrency.rollouts(1):
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(hold()) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@in_virtual_time
async def test_the_limit_grows_while_nothing_waits_and_the_cache_has_room():
    concurrency = Concurrency(1000, first=64)
    tasks = await occupied(concurrency, 600)
    assert (concurrency.running, concurrency.limit) == (64, 64)
    for _ in range(3):
        concurrency.adapt(IDLE)
    assert concurrency.running == concurrency.limit == 512, "it doubles until requests wait"
    concurrency.adapt(FULL)
    assert concurrency.limit == 512
    await end(tasks)
    assert concurrency.running == 0


@in_virtual_time
async def test_at_the_start_each_round_of_short_rollouts_doubles_the_limit():
    concurrency = Concurrency(500, first=64)
    most = 0

    async def short() -> None:
        nonlocal most
        async with concurrency.rollouts(8):
            most = max(most, concurrency.running)
            await asyncio.sleep(0.1)

    async def many() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(150):
                tasks.create_task(short())

    await many()
    assert most == concurrency.limit // 8 * 8 == 496
    assert now() == pytest.approx(0.5), "64, 128, 256, 496 and 256 of the 1200"
    concurrency.adapt(CROWDED)
    await many()
    assert concurrency.limit == 375, "after the first crowd, only the load moves it"


@in_virtual_time
async def test_the_limit_shrinks_while_requests_wait_and_returns():
    concurrency = Concurrency(1000, first=100)
    tasks = await occupied(concurrency, 300)
    concurrency.adapt(CROWDED)
    assert concurrency.limit == 75
    assert concurrency.running == 100, "running rollouts go on"
    for _ in range(50):
        concurrency.adapt(CROWDED)
    assert concurrency.limit == 8
    concurrency.adapt(IDLE)
    assert concurrency.limit == 40
    await end(tasks)


@in_virtual_time
async def test_an_unused_limit_does_not_grow():
    concurrency = Concurrency(1000, first=64)
    tasks = await occupied(concurrency, 10)
    concurrency.adapt(IDLE)
    assert concurrency.limit == 64
    await end(tasks)


@in_virtual_time
async def test_without_a_load_the_limit_follows_the_latency_of_a_token():
    concurrency = Concurrency(1000, first=64)
    tasks = await occupied(concurrency, 200)
    concurrency.adapt(None)
    assert concurrency.limit == 64, "no request has ended"
    concurrency.note_latency(1.0, 100)
    concurrency.adapt(None)
    assert concurrency.limit == 128
    for _ in range(20):
        concurrency.note_latency(5.0, 100)
    concurrency.adapt(None)
    assert concurrency.limit == 96
    await end(tasks)


@in_virtual_time
async def test_a_group_larger_than_the_limit_runs_alone():
    concurrency = Concurrency(4)
    async with concurrency.rollouts(16):
        assert concurrency.running == 16
        waiting = asyncio.create_task(concurrency.rollouts(1).__aenter__())
        await asyncio.sleep(1)
        assert not waiting.done()
        waiting.cancel()
    assert concurrency.running == 0
