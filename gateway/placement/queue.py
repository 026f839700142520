"""The queue for places, and for slots that engines run in: who is next, and what is given to whom.

Of those who wait, the next is who has been overtaken too often; else the highest priority; else the
one whose owner has least; else the first. Whoever does not fit is overtaken by those who do. Where
what is free is not enough, engines retire that have nothing to do and have served for `quantum`
seconds, the least recently used first."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from gateway.placement.room import Place, PlaceRequest, RetirableEngine, Room

_POLL_SECONDS = 0.5
_RETIREMENT = 30.0
"""Seconds for which the end of engines that have nothing to do is waited for."""


@dataclass(eq=False, kw_only=True)
class EngineSlot:
    """What an engine runs in, from its start to its end."""

    engine: RetirableEngine
    place: Place
    since: float
    starting: bool = True
    retiring: asyncio.Task[None] | None = None


@dataclass(eq=False, kw_only=True)
class PlaceQueue:
    """Gives what is free of `room`. `slots` has those of the engines that run, by their keys."""

    room: Room
    quantum: float
    clock: Callable[[], float]
    slots: dict[str, EngineSlot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._asks: dict[str, PlaceRequest] = {}
        self._numbers = count()
        self._polling: asyncio.TimerHandle | None = None

    async def granted(self, ask: PlaceRequest, *, within: float | None = None) -> None:
        """Return once it has what it asks for, or `within` so many seconds without that; but if
        engines that have nothing to do end for it, their end is waited for."""
        ask.number, self._asks[ask.key] = next(self._numbers), ask
        try:
            self.assign()
            if within is not None and any(slot.retiring for slot in self.slots.values()):
                within = max(within, _RETIREMENT)
            await asyncio.wait({ask.turn}, timeout=within)
        finally:
            if not ask.turn.done():
                del self._asks[ask.key]
                self.assign()

    @property
    def waiting(self) -> list[PlaceRequest]:
        """Those who wait, the next one first."""
        return self._in_turn(self.room)

    def explain(self, key: str) -> str:
        """Say what a run, or an engine, that has no place yet waits for; "" if it does not wait.

        Example: "2nd in the queue for a place on group train: 16 workers are there
        (TANDEM_GROUPS workers)"."""
        ask = self._asks.get(key)
        if ask is None:
            return ""
        rivals = [each for each in self.waiting if each is ask or self._compete(each, ask)]
        needs = [
            " or ".join(dict.fromkeys(g.family for g in self.room.groups_for(n)))
            for n in self.room.open(ask)
        ]
        where = " and ".join(f"a place on group {names}" for names in needs)
        position = _ordinal(rivals.index(ask) + 1)
        return f"{position} in the queue for {where or 'its start'}: {ask.why}"

    def _in_turn(self, room: Room) -> list[PlaceRequest]:
        places = Counter(place.owner for place in room.places.values())
        engines = Counter(room.places[key].owner for key in room.engines)

        def rank(ask: PlaceRequest) -> tuple[int, int, int, int]:
            if ask.due:
                return (0, 0, 0, ask.number)
            has = places if ask.engine is None else engines
            return (1, -ask.priority, has[ask.owner], ask.number)

        return sorted(self._asks.values(), key=rank)

    def _poll_later(self) -> None:
        """Look again soon: an engine may have nothing to do any more, or its quantum may end."""
        needed = self._asks or (self.room.drained and self.slots)
        if needed and self._polling is None:
            loop = asyncio.get_running_loop()
            self._polling = loop.call_later(_POLL_SECONDS, self._poll)

    def _poll(self) -> None:
        self._polling = None
        self.assign()

    def assign(self) -> None:
        """Give those who wait what is free. If it is not enough, make idle engines retire."""
        while self._grant():
            pass
        if self._asks and self.slots:
            self._make_room()
        self._retire_drained()
        self._poll_later()

    def _grant(self) -> bool:
        """Serve the next of those who wait whose needs are free, if there is one."""
        before: list[PlaceRequest] = []  # those that are due, and must not be overtaken any more
        for ask in self._in_turn(self.room):
            found = self._fit(self.room, ask)
            if not isinstance(found, str) and any(self._blocks(each, ask) for each in before):
                found = "others have waited for so long that they are next"
            if isinstance(found, str):
                ask.why = found
                before += [ask] if ask.due else []
                continue
            del self._asks[ask.key]
            for other in self._asks.values():
                other.overtaken += other.number < ask.number and self._compete(other, ask)
            self.room.add(*found)
            if ask.engine is not None:
                place = self.room.places[ask.key]
                self.slots[ask.key] = EngineSlot(engine=ask.engine, place=place, since=self.clock())
                self.room.engines.add(ask.key)
                self.room.starting.add(ask.key)
            ask.turn.set_result(found)
            return True
        return False

    def _make_room(self) -> None:
        """Let engines retire that have nothing to do, where that helps one who waits."""
        room, idle = self.room.copy(), []
        for slot in sorted(self.slots.values(), key=lambda slot: slot.engine.used_at):
            if slot.retiring is not None:
                room.end_engine(slot.place.key)
            elif (
                not slot.starting and slot.engine.idle and self.clock() - slot.since >= self.quantum
            ):
                idle.append(slot)
        before: list[PlaceRequest] = []
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

    def _would_help(self, slot: EngineSlot, ask: PlaceRequest) -> bool:
        place = slot.place
        if ask.engine is not None and not place.group.leased:
            return True
        needs = self.room.open(ask)
        return not self.room.is_kept(place.key) and any(
            place.group in self.room.groups_for(need)
            or (self.room.host_memory and need.host_memory and place.host_memory)
            for need in needs
        )

    def _compete(self, one: PlaceRequest, other: PlaceRequest) -> bool:
        """Whether what one gets may be what the other one waits for."""
        engines = one.engine is not None and other.engine is not None
        return engines or self._blocks(one, other)

    def _blocks(self, one: PlaceRequest, other: PlaceRequest) -> bool:
        """Whether a place of the one may be what keeps the other one from its own."""
        return any(
            (self.room.host_memory and a.host_memory and b.host_memory)
            or not set(self.room.groups_for(a)).isdisjoint(self.room.groups_for(b))
            for a in self.room.open(one)
            for b in self.room.open(other)
        )

    def _retire_drained(self) -> None:
        for slot in self.slots.values():
            drained = slot.place.group.name in self.room.drained
            leaves = drained and not self.room.is_kept(slot.place.key)
            if leaves and slot.retiring is None and not slot.starting and slot.engine.idle:
                self._retire(slot)

    def _fit(self, room: Room, ask: PlaceRequest) -> tuple[Place, ...] | str:
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
            elif (slot := self.slots.get(need.key)) is not None and slot.retiring is not None:
                return "its last engine is being stopped"
        return room.choose(needs, ask)


def _ordinal(number: int) -> str:
    """Examples: 1st, 2nd, 3rd, 4th, 11th."""
    ending = (
        "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{ending}"
