"""Model workers take turns on a group's devices, under a supervisor, in virtual time."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from tandem.settings.sharing import SharingSettings
from tests.support.gateway.supervised_workers import SupervisedWorld
from tests.support.virtual_time import in_virtual_time, now, run_in_virtual_time


@in_virtual_time
async def test_nothing_moves_while_nobody_waits():
    world = SupervisedWorld()
    a = world.worker("a")
    for _ in range(3):
        await a.compute(0.1)
        await asyncio.sleep(1000)
    assert a.log == []
    assert a.row.state == "awake"


@in_virtual_time
async def test_an_idle_worker_makes_room_for_one_that_waits():
    world = SupervisedWorld()
    a, b = world.worker("a"), world.worker("b")
    await a.compute(0.1)
    await b.compute(0.1)
    assert a.log == ["sleep"]
    await a.compute(0.1)
    assert (a.log, b.log) == (["sleep", "wake"], ["sleep"])


@in_virtual_time
async def test_gradients_stay_for_a_quantum_and_then_sleep_with_their_worker():
    world = SupervisedWorld(settings=SharingSettings(quantum=5))
    a, b = world.worker("a"), world.worker("b")
    await a.compute(0.1, begins_step="run")
    began = now()
    await b.compute(0.1)
    assert now() - began == pytest.approx(5, abs=0.5)
    await a.compute(0.1, ends_step="run")
    assert a.calls.open_steps == set()


@in_virtual_time
async def test_a_busy_worker_gives_way_after_its_quantum_and_at_a_step():
    world = SupervisedWorld(settings=SharingSettings(quantum=2))
    a, b = world.worker("a"), world.worker("b")
    order = []

    async def train():
        for step in range(20):
            await a.compute(0.4, begins_step="run")
            order.append(f"batch {step}")
            await a.compute(0.1, ends_step="run")
            order.append(f"step {step}")

    training = asyncio.create_task(train())
    await asyncio.sleep(0.1)
    await b.compute(0.1)
    assert order[-1].startswith("step")
    assert 3 <= len(order) // 2 <= 6
    await training


@in_virtual_time
async def test_a_worker_whose_next_calls_are_under_way_already_gives_way_at_its_step():
    world = SupervisedWorld(settings=SharingSettings(quantum=1, max_wait=60))
    a, b = world.worker("a", owner="ann"), world.worker("b", owner="bob")
    one_at_a_time, number = asyncio.Lock(), 0

    async def call(**step):
        async with world.supervisor.use("a", caller="run", **step), one_at_a_time:
            await asyncio.sleep(0.25)

    async def train():
        nonlocal number
        calls: list[asyncio.Task[None]] = []
        while True:
            number += 1
            calls.append(asyncio.create_task(call(step="begin" if number % 8 else "end")))
            if len(calls) == 4:
                await calls.pop(0)

    await a.placed()
    await b.placed()
    training = asyncio.create_task(train())
    await asyncio.sleep(0.1)
    began = now()
    await b.compute(0.1)
    assert now() - began < 3 and a.calls.open_steps == set()
    training.cancel()


@in_virtual_time
async def test_steps_longer_than_the_quantum_are_cut_only_until_their_length_is_known():
    world = SupervisedWorld(settings=SharingSettings(quantum=1, max_wait=60))
    workers = [world.worker("a", owner="ann"), world.worker("b", owner="bob")]
    sleeps = []

    async def train(worker):
        for _ in range(6):
            for _ in range(8):
                await worker.compute(0.5)
            await asyncio.sleep(6)  # the client samples
            sleeps.append(worker.log.count("sleep"))

    await asyncio.gather(*map(train, workers))
    assert sleeps[0] > 1
    assert sleeps[-1] - sleeps[-5] <= 4, "each further step of the two takes one turn"


@in_virtual_time
async def test_workers_that_are_never_idle_keep_the_quantum():
    world = SupervisedWorld(settings=SharingSettings(quantum=1, max_wait=60))
    workers = [world.worker("a", owner="ann"), world.worker("b", owner="bob")]

    async def train(worker):
        while True:
            await worker.compute(0.2)
            await asyncio.sleep(0.01)

    training = [asyncio.create_task(train(worker)) for worker in workers]
    await asyncio.sleep(60)
    assert all(worker.log.count("sleep") > 20 for worker in workers)
    assert [worker.calls.step_seconds for worker in workers] == [0, 0]
    for task in training:
        task.cancel()


@in_virtual_time
async def test_who_has_waited_too_long_is_served_in_the_middle_of_a_step():
    world = SupervisedWorld(settings=SharingSettings(quantum=1, max_wait=10))
    a, b = world.worker("a"), world.worker("b")

    async def accumulate():
        while True:
            await a.compute(0.5, begins_step="run")

    accumulating = asyncio.create_task(accumulate())
    await asyncio.sleep(0.1)
    began = now()
    await b.compute(0.1)
    assert 9 < now() - began < 12
    accumulating.cancel()


@in_virtual_time
async def test_equal_owners_get_equal_times_and_others_what_their_weight_says():
    settings = SharingSettings(quantum=1, weights={"bob": 2.0})
    world = SupervisedWorld(settings=settings)
    workers = [world.worker("a1", owner="ann"), world.worker("a2", owner="ann")]
    workers.append(world.worker("b", owner="bob"))

    async def work(worker):
        while True:
            await worker.compute(0.2)

    tasks = [asyncio.create_task(work(worker)) for worker in workers]
    await asyncio.sleep(600)
    seconds = [worker.busy_seconds for worker in workers]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.1)
    assert seconds[2] == pytest.approx(2 * (seconds[0] + seconds[1]), rel=0.1)
    for task in tasks:
        task.cancel()


@in_virtual_time
async def test_an_owner_that_wanted_nothing_does_not_catch_up():
    world = SupervisedWorld(settings=SharingSettings(quantum=1))
    a, b = world.worker("a", owner="ann"), world.worker("b", owner="bob")

    async def work(worker):
        while True:
            await worker.compute(0.2)

    first = asyncio.create_task(work(a))
    await asyncio.sleep(1000)
    second = asyncio.create_task(work(b))
    before = a.busy_seconds
    await asyncio.sleep(1000)
    assert b.busy_seconds < 600
    assert a.busy_seconds > before
    first.cancel(), second.cancel()


@in_virtual_time
async def test_a_higher_priority_is_next():
    world = SupervisedWorld()
    a, b, c = world.worker("a"), world.worker("b"), world.worker("c", priority=5)
    order = []

    async def one(worker):
        await worker.compute(1)
        order.append(worker.key)

    tasks = [asyncio.create_task(one(a))]
    await asyncio.sleep(0.1)
    tasks += [asyncio.create_task(one(worker)) for worker in (b, c)]
    await asyncio.gather(*tasks)
    assert order == ["a", "c", "b"]


@in_virtual_time
async def test_a_waiter_sees_its_place_in_the_queue():
    world = SupervisedWorld()
    a, b, c = (world.worker(key) for key in "abc")
    tasks = [asyncio.create_task(worker.compute(5)) for worker in (a, b, c)]
    await asyncio.sleep(1)
    assert "2nd in the queue for the devices of group g" in c.explain()
    assert a.explain() == ""
    await asyncio.gather(*tasks)


@in_virtual_time
async def test_whoever_gives_up_waiting_leaves_the_queue():
    world = SupervisedWorld()
    a, b = world.worker("a"), world.worker("b")
    working = asyncio.create_task(a.compute(5))
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(b.compute(1))
    await asyncio.sleep(1)
    waiting.cancel()
    await working
    await asyncio.sleep(100)
    assert a.log == []
    assert world.queue() == []
    assert b.row.state == "placed"


@in_virtual_time
async def test_whoever_gave_up_waiting_waits_from_anew_when_it_comes_back():
    world = SupervisedWorld(settings=SharingSettings(quantum=1, max_wait=60))
    a, b, c = (world.worker(key) for key in "abc")
    working = asyncio.create_task(a.compute(5))
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(b.compute(1))
    await asyncio.sleep(1)
    waiting.cancel()
    await working
    await asyncio.sleep(100)
    working, tasks = asyncio.create_task(a.compute(5)), []
    for worker in (c, b):
        await asyncio.sleep(0.1)
        tasks.append(asyncio.create_task(worker.compute(0.1)))
    await asyncio.sleep(0.1)
    assert world.queue() == ["c", "b"]
    await asyncio.gather(working, *tasks)


@in_virtual_time
async def test_a_worker_that_cannot_sleep_is_killed_before_another_wakes():
    world = SupervisedWorld()
    a, b = world.worker("a"), world.worker("b")
    await a.compute(0.1)
    a.process.fails.add("sleep")
    lost = a.process
    await b.compute(0.1)
    assert not lost.alive
    await a.compute(0.1)
    assert a.process is not lost


@in_virtual_time
async def test_a_frozen_holder_is_killed_and_the_others_go_on():
    world = SupervisedWorld(settings=SharingSettings(quantum=0.5))
    a, b = world.worker("a"), world.worker("b")
    working = asyncio.create_task(a.compute(5))
    await asyncio.sleep(1)
    a.freeze()
    began = now()
    await b.compute(0.1)
    assert now() - began < 20
    await working


@in_virtual_time
async def test_a_dead_holder_is_no_obstacle():
    world = SupervisedWorld()
    a, b = world.worker("a"), world.worker("b")
    await a.compute(0.1)
    a.die()
    assert a.row.state != "awake"
    await b.compute(0.1)
    assert a.log == []


@pytest.mark.parametrize("told_after", [3, 1000])
def test_a_sleeper_that_died_is_killed_only_if_nobody_soon_tells_its_end(told_after):
    async def scenario() -> None:
        world = SupervisedWorld()
        a, b = world.worker("a"), world.worker("b")
        await a.compute(0.1)
        await b.compute(0.1)
        a.process.unreachable = True
        asyncio.get_running_loop().call_later(told_after, a.die)
        await a.compute(0.1)
        killed_for = [] if told_after == 3 else ["it did not wake: the connection broke"]
        assert a.killed_for == killed_for

    run_in_virtual_time(scenario())


@in_virtual_time
async def test_gradients_end_with_their_process_and_hold_the_devices_no_more():
    world = SupervisedWorld(settings=SharingSettings(quantum=5))
    a, b = world.worker("a"), world.worker("b")
    await a.compute(0.1, begins_step="run")
    a.die()
    await a.compute(0.1)
    began = now()
    await b.compute(0.1)
    assert now() - began < 1


@in_virtual_time
async def test_eager_workers_sleep_though_nobody_waits():
    world = SupervisedWorld(settings=SharingSettings(policy="eager"))
    a = world.worker("a")
    await a.compute(0.1)
    await asyncio.sleep(1)
    assert a.log == ["sleep"]
    await a.compute(0.1, begins_step="run")
    await asyncio.sleep(10)
    assert a.log == ["sleep", "wake"]


@in_virtual_time
async def test_idle_workers_sleep_after_a_time():
    world = SupervisedWorld(settings=SharingSettings(policy="idle_after", idle_after=60))
    a = world.worker("a")
    await a.compute(0.1)
    await asyncio.sleep(59)
    assert a.log == []
    await asyncio.sleep(3)
    assert a.log == ["sleep"]


@in_virtual_time
async def test_the_next_gateway_knows_who_has_the_devices_and_who_waits():
    world = SupervisedWorld()
    a, b, c = (world.worker(key) for key in "abc")
    await a.compute(0.1)
    first = asyncio.create_task(a.compute(50))
    await asyncio.sleep(0.1)
    waiting = [asyncio.create_task(worker.compute(1)) for worker in (b, c)]
    await asyncio.sleep(0.2)
    for task in (first, *waiting):
        task.cancel()
    await world.restart()
    assert [worker.row.state for worker in (a, b, c)] == ["awake", "placed", "placed"]
    await asyncio.gather(c.compute(0.1), b.compute(0.1))
    assert a.log == ["sleep"]


@in_virtual_time
async def test_in_a_group_without_turns_everybody_is_always_awake():
    world = SupervisedWorld(awake=0)
    world.devices.most = 10
    workers = [world.worker(key) for key in "abc"]
    await asyncio.gather(*(worker.compute(1) for worker in workers))
    assert now() < 1.1


async def random_life(seed: int, *, events: int) -> None:
    """Workers train, sample and think. Processes die, freeze, fail and answer late. Disks are full,
    and gateways die. The world fails if two workers are awake at once, or if one exceeds the host's
    memory."""
    chance = random.Random(seed)
    awake, on_host = chance.choice([1, 1, 1, 2]), chance.choice([True, False])
    sizes = [chance.randint(1, 9) for _ in range(chance.randint(2, 5))]
    least_of_device = sum(sorted(sizes)[-awake:])
    least = least_of_device if on_host else 1
    world = SupervisedWorld(
        awake=awake,
        on_host=on_host,
        budget=chance.choice([0, least, least + 3, sum(sizes)]),
        disk=chance.choice([0, 10, 100]),
        device_memory=chance.choice([0, least_of_device, least_of_device + 5]) * (not on_host),
        processes=len(sizes),
        settings=SharingSettings(
            quantum=chance.choice([0, 0.5, 2]),
            max_wait=chance.choice([5, 50]),
            switch_timeout=3,
            policy=chance.choice(["deferred", "deferred", "eager", "idle_after"]),
            idle_after=1,
        ),
    )
    workers = [
        world.worker(
            f"w{i}",
            owner=chance.choice(["ann", "bob"]),
            kind=chance.choice(["trainer", "sampler"]),
            size=size,
            says=chance.choice([0, size, size + 1]),
        )
        for i, size in enumerate(sizes)
    ]
    done = dict.fromkeys((worker.key for worker in workers), 0)

    async def live(worker, seed):
        own = random.Random(seed)
        while True:
            kind = own.choice([{}, {"begins_step": worker.key}, {"ends_step": worker.key}])
            await worker.compute(own.choice([0.01, 0.3, 2]), **kind)
            done[worker.key] += 1
            await asyncio.sleep(own.choice([0, 0, 0.05, 3]))

    def begin():
        return [asyncio.create_task(live(worker, chance.random())) for worker in workers]

    lives = begin()
    for _ in range(events):
        await asyncio.sleep(chance.choice([0.001, 0.05, 0.5, 3, 20]))
        assert [life.exception() for life in lives if life.done()] == []
        worker = chance.choice(workers)
        match chance.choice(
            ["die", "freeze", "fail", "late", "slow", "storage", "restart", "calm", "disk"]
        ):
            case "die":
                worker.die()
            case "freeze":
                worker.freeze()
            case "fail" if worker.process is not None:
                worker.process.fails.add(chance.choice(["sleep", "wake"]))
            case "late" if worker.process is not None:
                worker.process.delay = chance.choice([0.001, 1, 5])
            case "slow" if worker.process is not None:
                worker.process.work = chance.choice([0.001, 1, 5])
            case "disk":
                world.devices.disk = chance.choice([0, 3, 100])
                world.devices.disk_fails = chance.choice([False, False, True])
            case "storage":
                world.table.failing = chance.randint(1, 4)
            case "restart":
                for life in lives:
                    life.cancel()
                await asyncio.gather(*lives, return_exceptions=True)
                await world.restart()
                lives = begin()
    before = dict(done)
    await asyncio.sleep(600)
    for life in lives:
        assert not life.done(), life.exception()
        life.cancel()
    await asyncio.gather(*lives, return_exceptions=True)
    assert all(done[key] > before[key] for key in done), "a worker waits for ever"
    await asyncio.sleep(10)
    world.devices.check()


@pytest.mark.parametrize(
    "block",
    [*range(3), *(pytest.param(block, marks=pytest.mark.nightly) for block in range(3, 10))],
)
def test_whatever_fails_no_two_are_awake_and_nobody_waits_for_ever(block):
    for seed in range(10 * block, 10 * block + 10):
        run_in_virtual_time(random_life(seed, events=30))


@pytest.mark.nightly
def test_ten_thousand_faults_on_the_virtual_clock():
    for seed in range(1000, 1000 + int(os.environ.get("TANDEM_TEST_LIVES", "200"))):
        run_in_virtual_time(random_life(seed, events=50))
