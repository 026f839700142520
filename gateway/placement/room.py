"""What there is room for: the places that are taken on the device groups, and what still fits.

A group takes a worker while it has fewer than `workers`, while its devices have memory for those
that are awake at once, and the host, or the node of a claim, for all; as far as sizes are known.
What is asked for is given on the groups with the fewest workers, all of it or nothing; but of the
claims of a pool, those that somebody uses come first, so that no more are made than are needed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import nlargest
from typing import Protocol

from gateway.placement.asks import Asks
from gateway.placement.groups import DeviceGroup, Role

_MOST_OVERTAKEN = 8
"""How many of those that came later, and want the same, may be served before somebody."""
_GIB = 2**30


def engine_key(sampler: str, number: int) -> str:
    """Return the key of the place of a sampler's engine of this number: "s-ab12/qwen/16" has the
    engines "s-ab12/qwen/16", "s-ab12/qwen/16#1" and so on."""
    return f"{sampler}#{number}" if number else sampler


def sampler_of(key: str) -> str:
    """Return the key of the sampler whose engine has the place of this key."""
    return key.partition("#")[0]


class RetirableEngine(Protocol):
    """An engine of a sampler. `key` is that of its place; `used_at` is when its last request
    ended, on the monotonic clock."""

    owner: str
    session_id: str
    used_at: float

    @property
    def key(self) -> str: ...

    @property
    def idle(self) -> bool: ...

    def retire(self) -> Coroutine[None, None, None]:
        """Take no more requests from now on; return what stops it and gives its slot back."""
        ...


@dataclass(frozen=True, kw_only=True)
class Place:
    """The right of one worker to exist on a group. `key` is that of a trainer, the id of its first
    run, or that of an engine. `keeps` is the key of the sampler whose places a trainer's runs keep,
    if they do."""

    key: str
    role: Role
    group: DeviceGroup
    owner: str
    session_id: str
    ranks: int = 1
    memory: int = 0
    host_memory: int = 0
    keeps: str = ""

    @property
    def devices(self) -> tuple[str, ...]:
        """Return what its worker is told: a device for each rank."""
        return tuple(str(device) for device in self.group.devices_for(self.ranks))

    def has_device_of(self, other: Place) -> bool:
        """Whether this worker and another one have one device each, which is the same, and are
        awake there at once. On the whole machine, this is its memory."""
        group = self.group
        at_once = group.awake != 1 and not group.pool
        return at_once and group.name == other.group.name and self.ranks == other.ranks == 1


@dataclass(frozen=True, kw_only=True)
class Need:
    """What one worker needs, on a certain group or on any."""

    key: str
    role: Role
    group: str
    ranks: int = 1
    memory: int = 0
    host_memory: int = 0
    keeps: str = ""


@dataclass(eq=False, kw_only=True)
class PlaceRequest:
    """Asks for the places of all `needs` at once, and for a slot of its `engine`, if it has one."""

    key: str
    owner: str
    session_id: str
    needs: tuple[Need, ...]
    priority: int = 0
    engine: RetirableEngine | None = None
    number: int = 0
    overtaken: int = 0
    why: str = ""
    turn: asyncio.Future[tuple[Place, ...]] = field(default_factory=asyncio.Future)

    @property
    def due(self) -> bool:
        return self.overtaken >= _MOST_OVERTAKEN

    @classmethod
    def of_run(
        cls, key: str, *, owner: str, session_id: str, asks: Asks, sampler: str
    ) -> PlaceRequest:
        """Return that of a run; `key` is that of its trainer, `sampler` that of its sampler."""
        keeps = sampler if asks.sampler else ""
        trainer = Need(
            key=key,
            role="trainer",
            group=asks.group,
            ranks=asks.ranks,
            memory=asks.memory,
            host_memory=asks.host_memory,
            keeps=keeps,
        )
        engines = (_sampler_need(engine_key(keeps, n), asks) for n in range(asks.replicas))
        return cls(
            key=key,
            owner=owner,
            session_id=session_id,
            needs=(trainer, *engines) if keeps else (trainer,),
            priority=asks.priority,
        )

    @classmethod
    def of_engines(
        cls, key: str, *, owner: str, session_id: str, engines: Mapping[str, Asks]
    ) -> PlaceRequest:
        """Return that of several engines of a sampler together, for their places alone. `engines`
        has what each asks for, by the key of its place."""
        return cls(
            key=key,
            owner=owner,
            session_id=session_id,
            needs=tuple(_sampler_need(each, asks) for each, asks in engines.items()),
            priority=max(asks.priority for asks in engines.values()),
        )

    @classmethod
    def of_engine(cls, engine: RetirableEngine, asks: Asks) -> PlaceRequest:
        return cls(
            key=engine.key,
            owner=engine.owner,
            session_id=engine.session_id,
            needs=(_sampler_need(engine.key, asks),),
            priority=asks.priority,
            engine=engine,
        )


@dataclass(eq=False, kw_only=True)
class Room:
    """What is taken of the groups: the places, and the keys of the engines that run (and of those
    that start, too). `drained` has the names of the groups that take nobody. `host_memory` is what
    all workers may need, 0: any number of bytes; `most_engines` may run on groups that are not
    leased, of which `most_starting` start."""

    most_engines: int
    most_starting: int
    groups: tuple[DeviceGroup, ...] = ()
    host_memory: int = 0
    places: dict[str, Place] = field(default_factory=dict)
    engines: set[str] = field(default_factory=set)
    starting: set[str] = field(default_factory=set)
    drained: set[str] = field(default_factory=set)

    def copy(self) -> Room:
        return replace(
            self,
            places=dict(self.places),
            engines=set(self.engines),
            starting=set(self.starting),
        )

    def emptied(self) -> Room:
        """Return it as it is when nobody has a place, and no group is drained."""
        return replace(self, places={}, engines=set(), starting=set(), drained=set())

    def on(self, group: DeviceGroup) -> list[Place]:
        return [place for place in self.places.values() if place.group is group]

    def is_kept(self, key: str) -> bool:
        sampler = sampler_of(key)
        return any(place.keeps == sampler for place in self.places.values())

    def engines_of(self, sampler: str) -> list[str]:
        """Return the keys of the places that a sampler's engines have."""
        return [key for key in self.places if sampler_of(key) == sampler]

    def add(self, *places: Place) -> None:
        self.places.update({place.key: place for place in places})

    def end_engine(self, key: str) -> Place | None:
        """Free what an engine has; return its place if that is free now, too."""
        self.engines.discard(key)
        self.starting.discard(key)
        return None if self.is_kept(key) else self.places.pop(key, None)

    @contextmanager
    def _with_place(self, place: Place) -> Iterator[None]:
        self.places[place.key] = place
        yield
        del self.places[place.key]

    # --- What fits ----------------------------------------------------------------------------

    def open(self, ask: PlaceRequest) -> list[Need]:
        """Return what it needs and does not have."""
        return [need for need in ask.needs if need.key not in self.places]

    def choose(self, needs: Sequence[Need], ask: PlaceRequest) -> tuple[Place, ...] | str:
        """Return a place for each of the needs, on the groups with the fewest workers; or why
        there is none."""
        taken: dict[str, list[Place]] = {group.name: [] for group in self.groups}
        for place in self.places.values():
            taken[place.group.name].append(place)
        for need in needs:  # what has no place at all has none beside the others
            if isinstance(found := self._choose([need], ask, taken), str):
                return found
        return self._choose(needs, ask, taken)

    def _choose(
        self,
        needs: Sequence[Need],
        ask: PlaceRequest,
        taken: dict[str, list[Place]],
        last: Need | None = None,
    ) -> tuple[Place, ...] | str:
        if not needs:
            return ()
        need, why = needs[0], ""
        groups = self.groups_for(need)
        for group in sorted(groups, key=lambda group: _preference(group, taken[group.name])):
            fault = self._fault(need, group, there=taken[group.name])
            if not fault and ask.engine is not None:
                fault = self.no_slot(group)
            if fault:
                why = why or fault
                continue
            place = Place(
                key=need.key,
                role=need.role,
                group=group,
                owner=ask.owner,
                session_id=ask.session_id,
                ranks=need.ranks,
                memory=need.memory,
                host_memory=need.host_memory,
                keeps=need.keeps,
            )
            with self._with_place(place):
                taken[group.name].append(place)
                others = self._choose(needs[1:], ask, taken, last=need)
                taken[group.name].pop()
            if not isinstance(others, str):
                return (place, *others)
            why = why or others
            if last is not None and replace(last, key=need.key) == need:
                break  # what takes the same wherever it is takes as much elsewhere
        return why

    def groups_for(self, need: Need) -> list[DeviceGroup]:
        return [
            group
            for group in self.groups
            if need.role in group.roles
            and group.is_meant_by(need.group)
            and group.has_devices_for(need.ranks)
        ]

    def faults(self, need: Need) -> list[str]:
        """Say of each group for a worker why it has no place there now."""
        return [
            f"{group.name}: {fault}"
            for group in self.groups_for(need)
            if (fault := self._fault(need, group, there=self.on(group)))
        ]

    def no_slot(self, group: DeviceGroup) -> str:
        """Say why no engine may start on a group now; "" if one may. On a leased group, only those
        start, and work, that have a lease; a pod has its own part of a machine."""
        if group.leased or group.pool:
            return ""
        running, starting = (
            sum(not self.places[key].group.leased for key in keys)
            for keys in (self.engines, self.starting)
        )
        if running >= self.most_engines:
            return f"{running} engines run on this machine (TANDEM_MAX_ENGINES)"
        if starting >= self.most_starting:
            return f"{starting} engines are starting, {self.most_starting} at most"
        return ""

    def _fault(self, need: Need, group: DeviceGroup, *, there: Sequence[Place]) -> str:
        """Say why a worker has no place on a group now; "" if it has."""
        if group.name in self.drained:
            return f"group {group.name} is drained, and takes no more workers"
        sampler = sampler_of(need.key)
        if group.leased and any(
            place.role == need.role == "sampler" and sampler_of(place.key) == sampler
            for place in there
        ):
            return f"another engine of the same sampler is on group {group.name}"
        if group.workers or (group.memory_bytes and need.memory):
            if len(there) >= group.workers > 0:
                setting = "TANDEM_CLAIM_POOLS" if group.pool else "TANDEM_GROUPS"
                return f"{len(there)} workers are there ({setting} workers)"
            awake = group.awake or len(there) + 1
            wanted = sum(nlargest(awake, [need.memory, *(place.memory for place in there)]))
            if need.memory and wanted > group.memory_bytes > 0:
                return (
                    f"those that are awake at once would need {_gib(wanted)} of a device's "
                    f"{_gib(group.memory_bytes)} on group {group.name}"
                )
        if need.host_memory and group.node_memory_bytes:
            taken = sum(place.host_memory for place in there)
            if taken + need.host_memory > group.node_memory_bytes:
                return (
                    f"it needs {_gib(need.host_memory)} of its node's memory, and workers have "
                    f"{_gib(taken)} of {_gib(group.node_memory_bytes)} on group {group.name}"
                )
        if need.host_memory and self.host_memory:
            taken = sum(place.host_memory for place in self.places.values())
            if taken + need.host_memory > self.host_memory:
                return (
                    f"it needs {_gib(need.host_memory)} of the host's memory, and workers have "
                    f"{_gib(taken)} of {_gib(self.host_memory)} (TANDEM_HOST_MEMORY_BYTES)"
                )
        return ""


def _preference(group: DeviceGroup, there: Sequence[Place]) -> tuple[bool, int]:
    """Return what groups are sorted by: of a pool, those that nobody uses come last."""
    return (bool(group.pool) and not there, len(there))


def _sampler_need(key: str, asks: Asks) -> Need:
    return Need(
        key=key,
        role="sampler",
        group=asks.sampler_group,
        ranks=asks.sampler_ranks,
        memory=asks.sampler_memory,
        host_memory=asks.sampler_host_memory,
    )


def _gib(size: int) -> str:
    return f"{size / _GIB:.4g} GiB"
