"""Who is said to have, to wait for and to have had devices, and to whom."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from sqlalchemy import Float, insert

from gateway.auth.identity import Caller
from gateway.metrics import Metrics
from gateway.placement.groups import DeviceGroup
from gateway.placement.leases import Leases
from gateway.placement.memory import HostMemory
from gateway.placement.occupancy import History, Occupant, history, occupants
from gateway.placement.places import Place
from gateway.storage.database import Database
from gateway.storage.tables import lease_spans
from tandem.devices import parse_device
from tandem.sharing_settings import SharingSettings
from tests.support.gateway.leased_workers import World, not_leased
from tests.support.virtual_time import in_virtual_time

ADMIN = Caller(owner="local", key_id="k-1", role="admin")
ANN = Caller(owner="ann", key_id="k-2", role="member")
BEN = Caller(owner="ben", key_id="k-3", role="reader")

TWO_DEVICES = DeviceGroup(
    name="train",
    roles=frozenset({"trainer"}),
    devices=(parse_device("cpu:0"), parse_device("cpu:1")),
)
ONE_DEVICE = DeviceGroup(
    name="sample", roles=frozenset({"sampler"}), devices=(parse_device("cpu:2"),)
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


class Past:
    """A database with spans, and the leases of now."""

    def __init__(self, database: Database, now: float) -> None:
        self.database = database
        self.now = now
        self.leases = Leases(
            database=database,
            settings=SharingSettings(),
            memory=HostMemory(spill_folder=Path("/spill"), least_free=0),
            metrics=Metrics(),
            epoch=1,
        )

    async def add(self, owner: str, *, began: float, ended: float, group: str = "train") -> None:
        """Times in seconds before now."""
        numbers = {each.name: 0.0 for each in lease_spans.c if isinstance(each.type, Float)}
        row = numbers | {
            "worker": f"{owner}'s run",
            "group_name": group,
            "kind": "trainer",
            "owner": owner,
            "session_id": f"{owner}'s session",
            "began": self.now - began,
            "wake_seconds": 0.25,
            "busy_seconds": (began - ended) / 2,
            "sleep_seconds": 0.5,
            "ended": self.now - ended,
        }
        await self.database.write(insert(lease_spans), row)

    async def seen_by(self, caller: Caller, **changes) -> History:
        about = {"since": self.now - 100, "until": self.now, "limit": 100, **changes}
        groups = (TWO_DEVICES, ONE_DEVICE)
        return await history(
            database=self.database, leases=self.leases, groups=groups, caller=caller, **about
        )


@pytest.fixture
async def past(tmp_path):
    database = Database(url="", data_dir=tmp_path)
    await database.open()
    past = Past(database, now=time.time())
    await past.leases.open((TWO_DEVICES, ONE_DEVICE), host_memory_bytes=0)
    await past.add("ann", began=300, ended=200)
    await past.add("ann", began=120, ended=90)
    await past.add("ben", began=90, ended=50)
    await past.add("ann", began=40, ended=10, group="sample")
    yield past
    await past.leases.close()
    await database.close()


async def test_the_spans_of_a_time_are_those_that_reach_into_it(past):
    found = await past.seen_by(ADMIN)
    assert [(span.owner, span.group_name) for span in found.spans] == [
        ("ann", "train"),
        ("ben", "train"),
        ("ann", "sample"),
    ]
    assert not found.truncated
    of_group = await past.seen_by(ADMIN, group="sample")
    assert [span.owner for span in of_group.spans] == ["ann"]


async def test_an_owner_is_told_of_its_own_spans_and_of_the_others_only_when(past):
    found = await past.seen_by(BEN)
    first, own, last = found.spans
    assert (own.owner, own.worker) == ("ben", "ben's run")
    for span in (first, last):
        assert (span.worker, span.kind, span.owner, span.session_id) == ("", "", "", "")
        assert span.ended > span.began
    assert [owner.owner for owner in found.owners] == ["ben"]
    assert "ann" not in str(asdict(found))


async def test_device_seconds_are_those_of_use_in_the_time_times_the_devices_of_the_group(past):
    found = await past.seen_by(ADMIN, limit=1)
    assert found.truncated and len(found.spans) == 1
    seconds = {owner.owner: owner.device_seconds for owner in found.owners}
    assert seconds == {"ben": pytest.approx(2 * 20), "ann": pytest.approx(2 * 5 + 15)}


async def test_who_has_the_devices_now_is_among_the_spans(past):
    world = World()
    lease = past.leases.of("sample").register(
        key="s-1/tiny/0",
        kind="sampler",
        owner="ann",
        session_id="s-1",
        tenant=world.worker("unused"),
    )
    async with lease.use():
        found = await past.seen_by(ANN, since=past.now - 1, until=time.time() + 1)
        (span,) = found.lasting
        assert (span.worker, span.owner) == ("s-1/tiny/0", "ann")
        assert past.now <= span.began <= span.ended <= time.time()
        (hidden,) = (await past.seen_by(BEN, until=time.time() + 1)).lasting
        assert hidden.worker == hidden.owner == hidden.session_id == ""
        assert (await past.seen_by(ANN, group="train")).lasting == []
