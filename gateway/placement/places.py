"""Places: which worker may exist on which device group.

A run takes the places of its trainer and of its session's engines at once, or waits for all, so
that no two runs each hold half of what both need. It keeps them until it ends. The place of a
sampler that no run keeps is the engine's alone: when another ask needs it, the engine is stopped
once it has nothing to do and has served for `quantum` seconds, the least recently used first; it
starts again when it is needed. Engines of one sampler that have none take theirs at once, too.

A sampler may be scaled while it lives: what it has more takes places at once or not at all, and how
many engines it is to have is committed with them.

An engine also needs a slot to run in. On groups that are not leased, where an engine with nothing
to do costs as much as another one, `most_engines` run, of which `most_starting` start at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Executable, RowMapping, delete, insert, select

from gateway.placement.asks import Asks
from gateway.placement.groups import DeviceGroup
from gateway.placement.queue import EngineSlot, PlaceQueue
from gateway.placement.room import Place, PlaceRequest, RetirableEngine, Room, engine_key
from gateway.storage.database import Database
from gateway.storage.tables import drained_groups, scaled_samplers
from gateway.storage.tables import places as table
from tandem.errors import InvalidRequest, NoRoom
from tandem.telemetry import get_log

MOST_STARTING = 2
"""Engines that may start at once: a start is work for several cores."""
ENGINE_QUANTUM = 60.0
"""Seconds that an idle engine keeps its place although others wait."""
_NAMED = 4
"""Groups of which a refusal says what is in the way."""


@dataclass(eq=False, kw_only=True)
class Places:
    """`most_engines` may run on groups that are not leased, and `most_starting` of them start at
    once. An engine that is idle gives way to others after `quantum` seconds."""

    database: Database
    most_engines: int
    most_starting: int
    quantum: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._room = Room(most_engines=self.most_engines, most_starting=self.most_starting)
        self.queue = PlaceQueue(room=self._room, quantum=self.quantum, clock=self.clock)
        self.scaled: dict[str, int] = {}
        """How many engines those samplers are to have that were scaled."""

    @property
    def groups(self) -> tuple[DeviceGroup, ...]:
        return self._room.groups

    async def open(
        self,
        groups: Sequence[DeviceGroup],
        *,
        host_memory_bytes: int,
        is_wanted: Callable[[Place], bool],
    ) -> None:
        """Take up the places that an earlier gateway gave and that are wanted still, where the
        groups have them; a trainer's with that of its sampler. `host_memory_bytes` is what all
        workers may need; 0: unbounded."""
        self._room.groups, self._room.host_memory = tuple(groups), host_memory_bytes
        for group in groups:
            get_log().info("device_group", **group.about())
        rows = await self.database.read(select(drained_groups))
        self._room.drained.update(row["name"] for row in rows)
        rows = await self.database.read(select(scaled_samplers))
        self.scaled.update((row["sampler"], row["replicas"]) for row in rows)
        rows = await self.database.read(select(table))
        for row in sorted(rows, key=lambda row: str(row["role"]), reverse=True):  # trainers first
            place = self._restored(row)
            if place is None or not (is_wanted(place) or self._room.is_kept(place.key)):
                self._forget(row["key"])
            else:
                self._room.add(place)

    def _restored(self, row: RowMapping) -> Place | None:
        group = next((each for each in self.groups if each.name == row["group_name"]), None)
        if group is None or not group.has_devices_for(row["ranks"]):
            return None
        place = Place(
            key=row["key"],
            role=row["role"],
            group=group,
            owner=row["owner"],
            session_id=row["session_id"],
            ranks=row["ranks"],
            memory=row["memory"],
            host_memory=row["host_memory"],
            keeps=row["keeps"],
        )
        same = " ".join(place.devices) == row["devices"] and place.role in group.roles
        return place if same else None

    def release_left(self, trainers: Sequence[str]) -> None:
        """Give back what an earlier gateway's trainers and engines had, except these trainers and
        the engines that were adopted."""
        for place in tuple(self._room.places.values()):
            if place.role == "trainer" and place.key not in trainers:
                self.release_trainer(place.key)
        for place in tuple(self._room.places.values()):
            if place.role == "sampler" and place.key not in self.queue.slots:
                self._end_engine(place.key)

    # --- Asking -------------------------------------------------------------------------------

    def check(self, ask: PlaceRequest) -> None:
        """Raise `InvalidRequest` for what would not fit if nobody had a place."""
        found = self._room.emptied().choose(ask.needs, ask)
        if isinstance(found, str):
            raise InvalidRequest(f"there can be no place for it: {found}")

    def has_room(self, asks: Sequence[PlaceRequest]) -> bool:
        """Whether all that these runs ask for could be given now."""
        needs = {need.key: need for ask in asks for need in self._room.open(ask)}
        return not isinstance(self._room.choose([*needs.values()], asks[-1]), str)

    async def take(self, ask: PlaceRequest) -> Place:
        """As `take_all`; return the place of the asking worker."""
        await self.take_all(ask)
        return self._room.places[ask.key]

    async def take_all(self, ask: PlaceRequest) -> None:
        """Wait until all that is asked for is there. Whoever has a place keeps it. A cancelled ask
        leaves nothing behind."""
        try:
            await self.queue.granted(ask)
            taken = ask.turn.result()
            for place in taken:
                self.database.write_soon(insert(table), _row(place))
            if taken:
                await self.database.flush()
        except BaseException:
            if not ask.turn.done():
                if ask.engine is not None and ask.key not in self.queue.slots:
                    self._end_engine(ask.key)  # it may have had one without a slot
            elif ask.engine is not None:
                self.give_back(self.queue.slots[ask.key])
            elif any(place.key == ask.key for place in ask.turn.result()):
                self.release_trainer(ask.key)
            else:
                self._undo(ask)
            raise

    def _undo(self, ask: PlaceRequest) -> None:
        """Give back what engines were given that have not begun to start."""
        for place in ask.turn.result() if ask.turn.done() else ():
            self.drop(place.key)

    async def take_for_engine(self, engine: RetirableEngine, asks: Asks) -> EngineSlot:
        """Return the engine's slot once it may start."""
        await self.take(PlaceRequest.of_engine(engine, asks))
        return self.queue.slots[engine.key]

    def adopt(self, engine: RetirableEngine) -> EngineSlot | None:
        """Return the slot of an engine that runs already, of which there may be more than
        `most_engines`; None if it has no place."""
        place = self._room.places.get(engine.key)
        if place is None:
            return None
        slot = EngineSlot(engine=engine, place=place, since=self.clock())
        self.queue.slots[engine.key] = slot
        self._room.engines.add(engine.key)
        self._room.starting.add(engine.key)
        return slot

    def on(self, group: DeviceGroup) -> list[Place]:
        return self._room.on(group)

    def get(self, key: str) -> Place | None:
        return self._room.places.get(key)

    def replicas_of(self, sampler: str, *, asked: int = 0) -> int:
        """Return how many engines a sampler is to have: what it was scaled to, else as many as were
        `asked` for or have a place."""
        return self.scaled.get(sampler) or max(asked, len(self._room.engines_of(sampler)))

    def note_started(self, slot: EngineSlot) -> None:
        """Note that the engine serves, so that another one may start."""
        slot.starting, slot.since = False, self.clock()
        self._room.starting.discard(slot.place.key)
        self.queue.assign()

    def give_back(self, slot: EngineSlot) -> None:
        """Note that nothing is left of an engine."""
        del self.queue.slots[slot.place.key]
        self._end_engine(slot.place.key)
        self.queue.assign()

    def drop(self, key: str) -> None:
        """Give back the place of an engine that its sampler is not to have any more, if it has one.
        Nothing is left of the engine."""
        if key not in self.queue.slots and self._room.places.pop(key, None) is not None:
            self._forget(key)
            self.queue.assign()

    def release_trainer(self, key: str) -> None:
        """Give back the places of a trainer of which nothing is left, if it has any."""
        place = self._room.places.pop(key, None)
        if place is None:
            return
        self._forget(key)
        for engine in self._room.engines_of(place.keeps) if place.keeps else ():
            if engine not in self.queue.slots:
                self._end_engine(engine)
        self.queue.assign()

    def _end_engine(self, key: str) -> None:
        if self._room.end_engine(key) is not None:
            self._forget(key)

    def _forget(self, key: str) -> None:
        self.database.write_soon(delete(table).where(table.c.key == key))

    # --- Scaling ------------------------------------------------------------------------------

    async def scale(
        self, sampler: str, replicas: int, ask: PlaceRequest | None, *, wait: float
    ) -> None:
        """Let a sampler have so many engines from now on, after a restart, too. What new ones `ask`
        for they get within `wait` seconds, all or nothing; places of those that are too many stay
        theirs until `drop`. Raises `NoRoom` and `StorageFailed`; then nothing has changed."""
        try:
            if ask is not None:
                await self.queue.granted(ask, within=wait)
                if not ask.turn.done():
                    raise NoRoom(self._why_not(sampler, ask))
            changes: list[Executable] = [
                delete(scaled_samplers).where(scaled_samplers.c.sampler == sampler),
                insert(scaled_samplers).values(sampler=sampler, replicas=replicas),
                *(insert(table).values(_row(each)) for each in (ask.turn.result() if ask else ())),
            ]
            await self.database.write_together(*changes)
        except BaseException:
            if ask is not None:
                self._undo(ask)
            raise
        self.scaled[sampler] = replicas

    def _why_not(self, sampler: str, ask: PlaceRequest) -> str:
        needs, has = self._room.open(ask), len(self._room.engines_of(sampler))
        room, fit = self._room.copy(), 0
        while fit < len(needs) and not isinstance(found := room.choose([needs[fit]], ask), str):
            room.add(*found)
            fit += 1
        faults = room.faults(needs[fit]) if fit < len(needs) else [ask.why]
        more = f"; and {len(faults) - _NAMED} more groups" if len(faults) > _NAMED else ""
        what = "engine needs" if len(needs) == 1 else "engines need"
        return (
            f"{len(needs)} more {what} a place, and there is room for {fit}: "
            f"{'; '.join(faults[:_NAMED])}{more}. Nothing has changed: {has} have one. Ask for "
            f"{has + fit} at most, wait for others to end (`tandem top` shows them), or declare "
            "more groups (TANDEM_GROUPS)"
        )

    def is_kept(self, sampler: str) -> bool:
        """Whether a run keeps the places of a sampler."""
        return self._room.is_kept(sampler)

    def forget_scaled(self, sampler: str) -> None:
        """Forget how many engines a sampler was to have that has ended."""
        if self.scaled.pop(sampler, None) is not None:
            named = scaled_samplers.c.sampler == sampler
            self.database.write_soon(delete(scaled_samplers).where(named))

    def drop_beyond(self, sampler: str) -> None:
        """Give back the places of engines that a sampler had before it was scaled down, and of
        which an earlier gateway was still ending the processes."""
        wanted = {engine_key(sampler, number) for number in range(self.scaled[sampler])}
        for key in self._room.engines_of(sampler):
            if key not in wanted:
                self.drop(key)

    # --- Draining -----------------------------------------------------------------------------

    async def drain(self, group: DeviceGroup, *, drained: bool) -> None:
        """Give nobody a place on a group any more, after a restart neither, and stop the engines
        there that no run keeps once they are idle; or undo it. Raises `StorageFailed`."""
        if drained:
            row = {"name": group.name}
            await self.database.write(self.database.insert_once(drained_groups), row)
            self._room.drained.add(group.name)
        else:
            named = drained_groups.c.name == group.name
            await self.database.write(delete(drained_groups).where(named))
            self._room.drained.discard(group.name)
        self.queue.assign()

    def is_drained(self, group: DeviceGroup) -> bool:
        return group.name in self._room.drained


def _row(place: Place) -> dict[str, object]:
    return {
        "key": place.key,
        "role": place.role,
        "group_name": place.group.name,
        "devices": " ".join(place.devices),
        "owner": place.owner,
        "session_id": place.session_id,
        "ranks": place.ranks,
        "memory": place.memory,
        "host_memory": place.host_memory,
        "keeps": place.keeps,
        "created_at": time.time(),
    }
