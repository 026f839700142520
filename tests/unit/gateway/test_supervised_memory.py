"""The state of sleepers goes to host memory or files, or a worker cannot sleep. The workers are
models, in virtual time."""

from __future__ import annotations

import asyncio

from tandem.settings.sharing import SharingSettings
from tests.support.gateway.supervised_workers import SupervisedWorld
from tests.support.virtual_time import in_virtual_time, now


@in_virtual_time
async def test_state_goes_to_host_memory_while_it_fits_and_then_to_a_file():
    world = SupervisedWorld(budget=10, disk=100)
    a, b, c = (world.worker(key, size=6) for key in "abc")
    for worker in (a, b, c):
        await worker.compute(0.1)
    assert (a.log, b.log, world.host_bytes) == (["sleep"], ["spill"], 6)
    await b.compute(0.1)
    assert (b.log, c.log) == (["spill", "wake"], ["spill"])


@in_virtual_time
async def test_an_engine_whose_weights_do_not_fit_drops_them():
    world = SupervisedWorld(budget=10)
    a, b, c = (world.worker(key, size=6, kind="sampler") for key in "abc")
    for worker in (a, b, c):
        await worker.compute(0.1)
    assert (a.process.host, b.process.host, world.host_bytes) == (6, 0, 6)


@in_virtual_time
async def test_whoever_finds_no_room_stays_awake_and_goes_on_and_the_others_hear_why():
    world = SupervisedWorld(budget=10, disk=0, settings=SharingSettings(quantum=0.5, max_wait=60))
    a, b, c = (world.worker(key, size=6) for key in "abc")
    await a.compute(0.1)
    await b.compute(0.1)
    waiting = asyncio.create_task(c.compute(0.1))
    await asyncio.sleep(1)
    why = c.explain()
    assert "cannot be put to sleep: workers use" in why
    assert "TANDEM_HOST_MEMORY_BYTES" in why
    assert "TANDEM_SPILL_DIR" in why
    await b.compute(0.1)
    assert b.log == []
    world.devices.disk = 6
    await waiting
    assert b.log == ["spill"]


@in_virtual_time
async def test_another_owner_hears_nothing_of_why_a_worker_stays_awake():
    world = SupervisedWorld(budget=10, disk=0, settings=SharingSettings(quantum=0.5, max_wait=60))
    a, b = (world.worker(key, size=6, owner="ann") for key in "ab")
    c = world.worker("c", size=6, owner="ben")
    await a.compute(0.1)
    await b.compute(0.1)
    waiting = asyncio.create_task(c.compute(0.1))
    await asyncio.sleep(1)
    assert c.explain().endswith("a worker of group g cannot be put to sleep")
    await waiting


@in_virtual_time
async def test_who_finds_no_room_to_sleep_for_as_long_as_anyone_waits_is_ended():
    world = SupervisedWorld(budget=10, disk=0, settings=SharingSettings(quantum=0.5, max_wait=60))
    a, b, c = (world.worker(key, size=6) for key in "abc")
    await a.compute(0.1)
    await b.compute(0.1)
    began, lost = now(), b.process
    await c.compute(0.1)
    assert 60 <= now() - began < 70
    assert not lost.alive
    await b.compute(0.1)


@in_virtual_time
async def test_where_devices_have_the_hosts_memory_sleepers_leave_it_for_who_is_to_wake():
    world = SupervisedWorld(on_host=True, budget=10, disk=100)
    a, b, c = (world.worker(key, size=4) for key in "abc")
    for worker in (a, b):
        await worker.compute(0.1)
    assert world.host_bytes == 8
    assert a.log == ["sleep"]
    await c.compute(0.1)
    assert (a.process.host, b.process.host, c.process.host) == (4, 0, 4)
    d = world.worker("d", size=6, kind="sampler")
    await d.compute(0.1)
    assert [each.process.host for each in (a, b, c, d)] == [4, 0, 0, 6]
    await c.compute(0.1)
    assert d.process.host == 0, "it has dropped its weights"


@in_virtual_time
async def test_who_says_nothing_wakes_beside_what_of_a_sleeper_cannot_leave_the_devices():
    world = SupervisedWorld(device_memory=10, processes=2)
    a, b = world.worker("a", size=8, says=9), world.worker("b", size=4)
    await a.compute(0.1)
    a.process.stuck = 2
    await b.compute(0.1)
    assert (a.process.left, a.log) == (2, ["sleep"])


@in_virtual_time
async def test_a_sleeper_that_can_leave_no_more_of_the_devices_is_ended_when_that_is_overdue():
    world = SupervisedWorld(
        device_memory=10, processes=2, settings=SharingSettings(quantum=0.5, max_wait=60)
    )
    a, b = world.worker("a", size=8, says=9), world.worker("b", size=9, says=10)
    await a.compute(0.1)
    sleeper, a.process.stuck = a.process, 2
    waiting = asyncio.create_task(b.compute(0.1))
    await asyncio.sleep(50)
    assert "sleepers have left" in b.explain()
    assert (a.log, sleeper.alive) == (["sleep"], True), "it is not woken again and again"
    await waiting
    assert 60 <= now() < 70
    assert not sleeper.alive
    await a.compute(0.1)


@in_virtual_time
async def test_the_next_gateway_finds_out_where_those_are_that_sleep():
    world = SupervisedWorld(budget=10, disk=100)
    a, b = (world.worker(key, size=6) for key in "ab")
    await a.compute(0.1)
    await b.compute(0.1)
    await world.restart()
    await asyncio.sleep(1)
    assert world.supervisor.overview().bytes["a"].host == 6
    assert a.row.state == "asleep"
    await a.compute(0.1)
    assert (a.process.awake, b.process.disk) == (True, 6)
