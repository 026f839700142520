"""Places: which worker may exist on which device group, and the queue of those that wait for one.

A run takes the places of its trainer and of its session's engines at once, or waits for all, so
that no two runs each hold half of what both need. It keeps them until it ends. The place of a
sampler that no run keeps is the engine's alone: when another ask needs it, the engine is stopped
once it has nothing to do and has served for `quantum` seconds, the least recently used first; it
starts again when it is needed. Engines of one sampler that have none take theirs at once, too.

A sampler may be scaled while it lives: what it has more takes places at once or not at all, and how
many engines it is to have is committed with them.

An engine also needs a slot to run in. On groups that are not leased, where an engine with nothing
to do costs as much as another one, `most_engines` run, of which `most_starting` start at once.

Of those who wait, the next is who has been overtaken too often; else the highest priority; else the
one whose owner has least; else the first. Whoever does not fit is overtaken by those who do.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from sqlalchemy import Executable, RowMapping, delete, insert, select

from gateway.placement.asks import Asks
from gateway.placement.groups import DeviceGroup
from gateway.placement.room import Ask, Engine, Place, Room, engine_key
from gateway.storage.database import Database
from gateway.storage.tables import drained_groups, scaled_samplers
from gateway.storage.tables import places as table
from tandem.errors import InvalidRequest, NoRoom
from tandem.telemetry import get_log

_POLL_SECONDS = 0.5
_NAMED = 4
"""Groups of which a refusal says what is in the way."""
_RETIREMENT = 30.0
"""Seconds for which the end of engines that have nothing to do is waited for."""


@dataclass(eq=False, kw_only=True)
class EngineSlot:
    """What an engine runs in, from its start to its end."""

    engine: Engine
    place: Place
    since: float
    starting: bool = True
    retiring: asyncio.Task[None] | None = None


@dataclass(eq=False, kw_only=True)
class Places:
    """`most_engines`, `most_starting` and `quantum`, in seconds, are for engines, see above."""

    database: Database
    most_engines: int
    most_starting: int
    quantum: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._room = Room(most_engines=self.most_engines, most_starting=self.most_starting)
        self._slots: dict[str, EngineSlot] = {}
        self._queue: dict[str, Ask] = {}
        self.scaled: dict[str, int] = {}
        """How many engines those samplers are to have that were scaled."""
        self._numbers = count()
        self._polling: asyncio.TimerHandle | None = None

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
        for group in self.groups:
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
            same = group.name == row["group_name"] and group.has_devices_for(place.ranks)
            same = same and " ".join(place.devices) == row["devices"]
            if same and place.role in group.roles:
                return place
        return None

    def release_left(self, trainers: Sequence[str]) -> None:
        """Give back what an earlier gateway's trainers and engines had, except these trainers and
        the engines that were adopted."""
        for place in tuple(self._room.places.values()):
            if place.role == "trainer" and place.key not in trainers:
                self.release_trainer(place.key)
        for place in tuple(self._room.places.values()):
            if place.role == "sampler" and place.key not in self._slots:
                self._end_engine(place.key)

    # --- Asking -------------------------------------------------------------------------------

    def check(self, ask: Ask) -> None:
        """Raise `InvalidRequest` for what would not fit if nobody had a place."""
        found = self._room.emptied().choose(ask.needs, ask)
        if isinstance(found, str):
            raise InvalidRequest(f"there can be no place for it: {found}")

    def has_room(self, asks: Sequence[Ask]) -> bool:
        """Whether all that these runs ask for could be given now."""
        needs = {need.key: need for ask in asks for need in self._room.open(ask)}
        return not isinstance(self._room.choose([*needs.values()], asks[-1]), str)

    async def take(self, ask: Ask) -> Place:
        """Wait until all that is asked for is there, and return the place of the asking worker.
        Whoever has a place keeps it. A cancelled ask leaves nothing behind."""
        await self._take(ask)
        return self._room.places[ask.key]

    async def take_for_engines(self, ask: Ask) -> None:
        """Wait until all engines that are asked for have a place. As `take`."""
        await self._take(ask)

    async def _take(self, ask: Ask) -> None:
        try:
            await self._granted(ask)
            taken = ask.turn.result()
            for place in taken:
                self.database.write_soon(insert(table), _row(place))
            if taken:
                await self.database.flush()
        except BaseException:
            if not ask.turn.done():
                if ask.engine is not None and ask.key not in self._slots:
                    self._end_engine(ask.key)  # it may have had one without a slot
            elif ask.engine is not None:
                self.give_back(self._slots[ask.key])
            elif any(place.key == ask.key for place in ask.turn.result()):
                self.release_trainer(ask.key)
            else:
                self._undo(ask)
            raise

    async def _granted(self, ask: Ask, *, within: float | None = None) -> None:
        """Return once it has what it asks for, or `within` so many seconds without that; but if
        engines that have nothing to do end for it, their end is waited for."""
        ask.number, self._queue[ask.key] = next(self._numbers), ask
        try:
            self._assign()
            if within is not None and any(slot.retiring for slot in self._slots.values()):
                within = max(within, _RETIREMENT)
            await asyncio.wait({ask.turn}, timeout=within)
        finally:
            if not ask.turn.done():
                del self._queue[ask.key]
                self._assign()

    def _undo(self, ask: Ask) -> None:
        """Give back what engines were given that have not begun to start."""
        for place in ask.turn.result() if ask.turn.done() else ():
            self.drop(place.key)

    async def take_for_engine(self, engine: Engine, asks: Asks) -> EngineSlot:
        """Return the engine's slot once it may start."""
        await self.take(Ask.of_engine(engine, asks))
        return self._slots[engine.key]

    def adopt(self, engine: Engine) -> EngineSlot | None:
        """Return the slot of an engine that runs already, of which there may be more than
        `most_engines`; None if it has no place."""
        place = self._room.places.get(engine.key) or self._whole_machine_for(engine)
        if place is None:
            return None
        slot = EngineSlot(engine=engine, place=place, since=self.clock())
        self._slots[engine.key] = slot
        self._room.engines.add(engine.key)
        self._room.starting.add(engine.key)
        return slot

    def _whole_machine_for(self, engine: Engine) -> Place | None:
        """Make a place for the engine of an earlier release, which wrote none down."""
        for group in self.groups:
            if group.whole_machine and "sampler" in group.roles:
                place = Place(
                    key=engine.key,
                    role="sampler",
                    group=group,
                    owner=engine.owner,
                    session_id=engine.session_id,
                )
                self._room.add(place)
                self.database.write_soon(insert(table), _row(place))
                return place
        return None

    def get(self, key: str) -> Place | None:
        return self._room.places.get(key)

    def replicas_of(self, sampler: str, *, asked: int = 0) -> int:
        """Return how many engines a sampler is to have: what it was scaled to, else as many as were
        `asked` for or have a place."""
        return self.scaled.get(sampler) or max(asked, len(self._room.engines_of(sampler)))

    def may_adopt(self, key: str) -> bool:
        """Whether the trainer that an earlier gateway left is where it may be."""
        whole = (group.whole_machine and "trainer" in group.roles for group in self.groups)
        return key in self._room.places or any(whole)

    def note_started(self, slot: EngineSlot) -> None:
        """Note that the engine serves, so that another one may start."""
        slot.starting, slot.since = False, self.clock()
        self._room.starting.discard(slot.place.key)
        self._assign()

    def give_back(self, slot: EngineSlot) -> None:
        """Note that nothing is left of an engine."""
        del self._slots[slot.place.key]
        self._end_engine(slot.place.key)
        self._assign()

    def drop(self, key: str) -> None:
        """Give back the place of an engine that its sampler is not to have any more, if it has one.
        Nothing is left of the engine."""
        if key not in self._slots and self._room.places.pop(key, None) is not None:
            self._forget(key)
            self._assign()

    def release_trainer(self, key: str) -> None:
        """Give back the places of a trainer of which nothing is left, if it has any."""
        place = self._room.places.pop(key, None)
        if place is None:
            return
        self._forget(key)
        for engine in self._room.engines_of(place.keeps) if place.keeps else ():
            if engine not in self._slots:
                self._end_engine(engine)
        self._assign()

    def _end_engine(self, key: str) -> None:
        if self._room.end_engine(key) is not None:
            self._forget(key)

    def _forget(self, key: str) -> None:
        self.database.write_soon(delete(table).where(table.c.key == key))

    # --- Scaling ------------------------------------------------------------------------------

    async def scale(self, sampler: str, replicas: int, ask: Ask | None, *, wait: float) -> None:
        """Let a sampler have so many engines from now on, after a restart, too. What new ones `ask`
        for they get within `wait` seconds, all or nothing; places of those that are too many stay
        theirs until `drop`. Raises `NoRoom` and `StorageFailed`; then nothing has changed."""
        try:
            if ask is not None:
                await self._granted(ask, within=wait)
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

    def _why_not(self, sampler: str, ask: Ask) -> str:
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
        self._assign()

    def is_drained(self, group: DeviceGroup) -> bool:
        return group.name in self._room.drained

    def _retire_drained(self) -> None:
        for slot in self._slots.values():
            leaves = self.is_drained(slot.place.group) and not self._room.is_kept(slot.place.key)
            if leaves and slot.retiring is None and not slot.starting and slot.engine.idle:
                self._retire(slot)

    # --- The queue ----------------------------------------------------------------------------

    @property
    def waiting(self) -> list[Ask]:
        """Those who wait, the next one first."""
        return self._in_turn(self._room)

    def on(self, group: DeviceGroup) -> list[Place]:
        return self._room.on(group)

    def explain(self, key: str) -> str:
        """Say what a run, or an engine, that has no place yet waits for; "" if it does not wait.

        Literal example: "2nd in the queue for a place on group train: 16 workers are there
        (TANDEM_GROUPS workers)".
        """
        ask = self._queue.get(key)
        if ask is None:
            return ""
        rivals = [each for each in self.waiting if each is ask or self._compete(each, ask)]
        needs = [
            " or ".join(dict.fromkeys(g.family for g in self._room.groups_for(n)))
            for n in self._room.open(ask)
        ]
        where = " and ".join(f"a place on group {names}" for names in needs)
        position = _ordinal(rivals.index(ask) + 1)
        return f"{position} in the queue for {where or 'its start'}: {ask.why}"

    def _in_turn(self, room: Room) -> list[Ask]:
        places = Counter(place.owner for place in room.places.values())
        engines = Counter(room.places[key].owner for key in room.engines)

        def rank(ask: Ask) -> tuple[int, int, int, int]:
            if ask.due:
                return (0, 0, 0, ask.number)
            has = places if ask.engine is None else engines
            return (1, -ask.priority, has[ask.owner], ask.number)

        return sorted(self._queue.values(), key=rank)

    def _poll_later(self) -> None:
        """Look again soon: an engine may have nothing to do any more, or its quantum may end."""
        needed = self._queue or (self._room.drained and self._slots)
        if needed and self._polling is None:
            loop = asyncio.get_running_loop()
            self._polling = loop.call_later(_POLL_SECONDS, self._poll)

    def _poll(self) -> None:
        self._polling = None
        self._assign()

    def _assign(self) -> None:
        """Give those who wait what is free. If it is not enough, make idle engines retire."""
        while self._grant():
            pass
        if self._queue and self._slots:
            self._make_room()
        self._retire_drained()
        self._poll_later()

    def _grant(self) -> bool:
        """Serve the next of those who wait whose needs are free, if there is one."""
        before: list[Ask] = []  # those that are due, and must not be overtaken any more
        for ask in self._in_turn(self._room):
            found = self._fit(self._room, ask)
            if not isinstance(found, str) and any(self._blocks(each, ask) for each in before):
                found = "others have waited for so long that they are next"
            if isinstance(found, str):
                ask.why = found
                before += [ask] if ask.due else []
                continue
            del self._queue[ask.key]
            for other in self._queue.values():
                other.overtaken += other.number < ask.number and self._compete(other, ask)
            self._room.add(*found)
            if ask.engine is not None:
                place = self._room.places[ask.key]
                self._slots[ask.key] = EngineSlot(
                    engine=ask.engine, place=place, since=self.clock()
                )
                self._room.engines.add(ask.key)
                self._room.starting.add(ask.key)
            ask.turn.set_result(found)
            return True
        return False

    def _make_room(self) -> None:
        """Let engines retire that have nothing to do, where that helps one who waits."""
        room, idle = self._room.copy(), []
        for slot in sorted(self._slots.values(), key=lambda slot: slot.engine.used_at):
            if slot.retiring is not None:
                room.end_engine(slot.place.key)
            elif (
                not slot.starting and slot.engine.idle and self.clock() - slot.since >= self.quantum
            ):
                idle.append(slot)
        before: list[Ask] = []
        for ask in self._in_turn(room) if idle else ():
            if any(self._blocks(each, ask) for each in before):
                continue
            found, ended = self._fit(room, ask), []
            for slot in [slot for slot in idle if self._would_help(slot, ask)]:
                if not isinstance(found, str):
                    break
                room.end_engine(slot.place.key)
                ended.append(slot)
                found = self._fit(room, ask)
            if isinstance(found, str):
                before += [ask] if ask.due else []
                for slot in ended:  # in vain
                    room.add(slot.place)
                    room.engines.add(slot.place.key)
                continue
            room.add(*found)
            if ask.engine is not None:
                room.engines.add(ask.key)
                room.starting.add(ask.key)
            for slot in ended:
                idle.remove(slot)
                self._retire(slot)

    def _retire(self, slot: EngineSlot) -> None:
        slot.retiring = asyncio.create_task(slot.engine.retire(), name="engine-retires")

    def _would_help(self, slot: EngineSlot, ask: Ask) -> bool:
        place = slot.place
        if ask.engine is not None and not place.group.leased:
            return True
        needs = self._room.open(ask)
        return not self._room.is_kept(place.key) and any(
            place.group in self._room.groups_for(need)
            or (self._room.host_memory and need.host_memory and place.host_memory)
            for need in needs
        )

    def _compete(self, one: Ask, other: Ask) -> bool:
        """Whether what one gets may be what the other one waits for."""
        engines = one.engine is not None and other.engine is not None
        return engines or self._blocks(one, other)

    def _blocks(self, one: Ask, other: Ask) -> bool:
        """Whether a place of the one may be what keeps the other one from its own."""
        return any(
            (self._room.host_memory and a.host_memory and b.host_memory)
            or not set(self._room.groups_for(a)).isdisjoint(self._room.groups_for(b))
            for a in self._room.open(one)
            for b in self._room.open(other)
        )

    # --- What fits ----------------------------------------------------------------------------

    def _fit(self, room: Room, ask: Ask) -> tuple[Place, ...] | str:
        """Return the places that it can have now, besides those that it has, or why it cannot."""
        needs = []
        if ask.engine is not None:
            if ask.key in room.engines:
                return "its last engine is being stopped"
            place = room.places.get(ask.key)
            if place is not None and (why := room.no_slot(place.group)):
                return why
        for need in ask.needs:
            if need.key not in room.places:
                needs.append(need)
            elif (slot := self._slots.get(need.key)) is not None and slot.retiring is not None:
                return "its last engine is being stopped"
        return room.choose(needs, ask)


def _ordinal(number: int) -> str:
    """Literal examples: 1st, 2nd, 3rd, 4th, 11th."""
    ending = (
        "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{ending}"


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
