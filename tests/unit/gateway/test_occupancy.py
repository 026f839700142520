"""The workers of a group and their turns, as each caller sees them."""

from __future__ import annotations

import asyncio

from prometheus_client import generate_latest

from gateway.owners.auth.identity import Caller
from gateway.placement.groups import DeviceGroup
from gateway.placement.occupancy import Occupant, occupants
from gateway.placement.places import Place
from tandem.protocol.devices import parse_device
from tandem.settings.sharing import SharingSettings
from tests.support.gateway.leased_workers import World, not_leased
from tests.support.virtual_time import in_virtual_time

ADMIN = Caller(owner="local", key_id="k-1", role="admin")
BEN = Caller(owner="ben", key_id="k-3", role="reader")

TWO_DEVICES = DeviceGroup(
    name="train",
    roles=frozenset({"trainer"}),
    devices=(parse_device("cpu:0"), parse_device("cpu:1")),
)


def seen(world: World) -> list[Occupant]:
    return occupants(world.group, [], now=asyncio.get_running_loop().time())


async def crowd() -> tuple[World, list[asyncio.Task[None]]]:
    """`a1` of ann has the devices for 3 s, and needs them on; `b` of ben and `a2` of ann wait for
    2 s; `c` of ben is asleep, `d` was never started."""
    world = World(settings=SharingSettings(quantum=1000))
    for key, owner in (("c", "ben"), ("a1", "ann"), ("b", "ben"), ("a2", "ann"), ("d", "ann")):
        world.worker(key, owner=owner, size=2)
    await world.workers["c"].compute(1)
    tasks = [asyncio.create_task(world.workers["a1"].compute(500))]
    await asyncio.sleep(1)
    for key in ("b", "a2"):
        tasks.append(asyncio.create_task(world.workers[key].compute(1)))
        await asyncio.sleep(1)
    return world, tasks


def end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()


@in_virtual_time
async def test_holders_come_first_then_those_that_wait_in_turn_then_the_others():
    world, tasks = await crowd()
    found = [(each.worker, each.state, each.position) for each in seen(world)]
    assert found == [
        ("a1", "awake", 0),
        ("b", "waiting", 1),
        ("a2", "waiting", 2),
        ("c", "asleep", 0),
        ("d", "absent", 0),
    ]
    holder, first, second, *_ = seen(world)
    assert (round(first.seconds), round(second.seconds)) == (2, 1)
    assert holder.seconds == holder.device_seconds > 2
    assert holder.expected_seconds == 0 < first.expected_seconds < second.expected_seconds
    assert first.reason == world.workers["b"].lease.explain()
    assert "0 before it in the queue, 2 s so far" in first.reason
    end(tasks)


@in_virtual_time
async def test_of_another_owners_workers_there_are_state_and_turn_and_nothing_else():
    world, tasks = await crowd()
    for each in seen(world):
        told = each.for_caller(BEN)
        if each.owner == "ben":
            assert told == each
        else:
            assert told == Occupant(each.state, position=each.position)
        assert each.for_caller(ADMIN) == each
    end(tasks)


@in_virtual_time
async def test_on_a_drained_group_idle_workers_sleep_and_what_runs_goes_on():
    world = World()
    a, b = world.worker("a"), world.worker("b")
    await a.compute(0.1)
    working = asyncio.create_task(b.compute(50))
    await asyncio.sleep(10)
    world.group.drain(True)
    await working
    await asyncio.sleep(1)
    assert (a.log, b.log) == (["sleep"], ["sleep"])
    await a.compute(0.1)
    world.group.drain(False)
    await asyncio.sleep(1000)
    assert a.lease.state == "held"


def test_workers_of_a_group_that_is_not_leased_are_all_awake():
    async def scenario() -> None:
        place = Place(key="run", role="trainer", group=TWO_DEVICES, owner="ann", session_id="s")
        (found,) = occupants(not_leased(), [place], now=0.0)
        assert (found.state, found.worker, found.kind) == ("awake", "run", "trainer")

    asyncio.run(scenario())


@in_virtual_time
async def test_the_metrics_count_holders_waiters_and_bytes_of_each_group():
    world, tasks = await crowd()
    metrics = world.group._metrics
    world.group.watch()
    shown = generate_latest(metrics.registry).decode()
    assert 'tandem_gateway_lease_holders{group="g"} 1.0' in shown
    assert 'tandem_gateway_lease_waiters{group="g"} 2.0' in shown
    assert 'tandem_gateway_resident_bytes{group="g"} 0.0' in shown
    assert 'tandem_gateway_sleeping_bytes{group="g"} 2.0' in shown, "those of c"
    end(tasks)
