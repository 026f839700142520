"""Places on some groups with a dictionary as database, and runs and engines that request them."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

from sqlalchemy import insert

from gateway.placement.asks import Asks
from gateway.placement.groups import DeviceGroup, groups_of
from gateway.placement.places import ENGINE_QUANTUM, MOST_STARTING, Places
from gateway.placement.room import PlaceRequest
from gateway.storage.tables import drained_groups, scaled_samplers
from tandem.agent.host import Host
from tandem.errors import StorageFull
from tandem.protocol.devices import parse_device
from tandem.settings.gateway import GatewaySettings
from tests.support.waiting import PATIENCE

WHOLE_MACHINE = groups_of(GatewaySettings(), Host("host", cores=(0, 1)))


class Rows:
    """A dictionary as a database of places. It refuses transactions while `full`."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, object]] = {}
        self.drained: set[str] = set()
        self.scaled: dict[str, int] = {}
        self.full = False

    async def read(self, query):
        if query.get_final_froms() == [drained_groups]:
            return [{"name": name} for name in self.drained]
        if query.get_final_froms() == [scaled_samplers]:
            return [{"sampler": key, "replicas": n} for key, n in self.scaled.items()]
        return list(self.rows.values())

    def insert_once(self, table):
        return insert(table)

    async def write(self, statement, *rows) -> None:
        self.drained.update(row["name"] for row in rows)
        if statement.is_delete:
            self.drained.discard(statement.compile().params["name_1"])

    async def write_together(self, *statements) -> None:
        if self.full:
            raise StorageFull("the disk is full")
        for statement in statements:
            params = statement.compile().params
            if statement.table is not scaled_samplers:
                self.write_soon(statement, params)
            elif statement.is_insert:
                self.scaled[params["sampler"]] = params["replicas"]

    def write_soon(self, statement, *rows) -> None:
        if statement.table is scaled_samplers:
            self.scaled.pop(statement.compile().params["sampler_1"], None)
            return
        for row in rows:
            self.rows[row["key"]] = row
        if statement.is_delete:
            self.rows.pop(statement.compile().params["key_1"], None)

    async def flush(self) -> bool:
        return True


def group(name: str, *roles: str, **changes) -> DeviceGroup:
    number = sum(map(ord, name)) % 1000
    values = {"devices": (parse_device(f"cpu:{number}"),), "workers": 2} | changes
    return DeviceGroup(name=name, roles=frozenset(roles or ("trainer", "sampler")), **values)


WHOLE = group("cpu", devices=(), workers=0, awake=0, most_ranks=8)
TRAIN, SAMPLE = group("train", "trainer"), group("sample", "sampler")


class World:
    """The clock stands still."""

    def __init__(self, *groups: DeviceGroup, host: int = 0, engines: int = 99, starting: int = 99):
        self.now = 0.0
        self.rows = Rows()
        self.groups, self.host = groups, host
        self.limits = {"most_engines": engines, "most_starting": starting, "quantum": 60.0}
        self.numbers = count()

    async def open(self, active=lambda _session: True) -> World:
        self.places = Places(database=self.rows, clock=lambda: self.now, **self.limits)
        await self.places.open(
            self.groups,
            host_memory_bytes=self.host,
            is_wanted=lambda place: active(place.session_id),
        )
        return self

    def run(self, owner: str = "ann", run_id: str = "", **asks) -> Run:
        return Run(self, owner, run_id or f"run-{next(self.numbers)}", Asks(**asks))

    def engine(self, owner: str = "ann", **values) -> Engine:
        return Engine(self, owner, f"sampler-{next(self.numbers)}", **values)

    def keys(self, group: DeviceGroup) -> list[str]:
        return sorted(place.key for place in self.places.on(group))


async def quiet() -> None:
    """Wait until no task can proceed."""
    for _ in range(8):
        await asyncio.sleep(0)


class Asking:
    task: asyncio.Task | None = None

    async def ask(self):
        self.task = asyncio.create_task(self.take())
        await quiet()
        return self

    @property
    def has(self) -> bool:
        return self.task is not None and self.task.done() and not self.task.cancelled()

    async def granted(self):
        await asyncio.wait_for(asyncio.shield(self.task), PATIENCE)
        return self

    async def give_up(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Run(Asking):
    def __init__(self, world: World, owner: str, run_id: str, asks: Asks) -> None:
        self.places, self.owner, self.key, self.asks = world.places, owner, run_id, asks
        self.sampler = f"sampler-of-{run_id}"

    def as_ask(self) -> PlaceRequest:
        return PlaceRequest.of_run(
            self.key, owner=self.owner, session_id="s", asks=self.asks, sampler=self.sampler
        )

    async def take(self):
        self.place = await self.places.take(self.as_ask())

    def end(self) -> None:
        self.places.release_trainer(self.key)

    @property
    def why(self) -> str:
        return self.places.queue.explain(self.key)


class Engine(Asking):
    session_id = "s"

    def __init__(self, world, owner, key, *, idle=False, used_at=0.0, asks=Asks()) -> None:  # noqa: B008
        self.places, self.owner, self.key, self.asks = world.places, owner, key, asks
        self.idle, self.used_at, self.slot, self.retired = idle, used_at, None, False

    async def take(self):
        self.slot = await self.places.take_for_engine(self, self.asks)

    async def serve(self) -> Engine:
        await (await self.ask()).granted()
        self.places.note_started(self.slot)
        return self

    async def retire(self) -> None:
        self.retired = True
        self.places.give_back(self.slot)

    @property
    def why(self) -> str:
        return self.places.queue.explain(self.key)


def places_for(
    settings: GatewaySettings,
    rows: Any,
    *,
    most_starting: int = MOST_STARTING,
    quantum: float = ENGINE_QUANTUM,
) -> Places:
    return Places(
        database=rows,
        most_engines=settings.max_engines,
        most_starting=most_starting,
        quantum=quantum,
    )


async def open_on(places: Places, *groups: DeviceGroup) -> Places:
    await places.open(groups, host_memory_bytes=0, is_wanted=lambda _place: True)
    return places


async def open_places(**limits: Any) -> Places:
    rows: Any = Rows()
    return await open_on(Places(database=rows, **limits), *WHOLE_MACHINE)
