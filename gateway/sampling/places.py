"""Places for engines: how many run on this machine, and how many of them start, at once.

An engine takes a place before it starts and keeps it until it has ended. Of those that wait, the
one whose owner has the fewest places is next. When all are taken, an engine with nothing to do that
has served for `quantum` seconds is stopped for the next one, the least recently used first; it
starts again when it is needed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol

_POLL_SECONDS = 0.5


class Engine(Protocol):
    """`used_at` is when its last request ended, on the monotonic clock."""

    owner: str
    used_at: float

    @property
    def idle(self) -> bool: ...

    def retire(self) -> Coroutine[None, None, None]:
        """Take no more requests from now on; return what stops it and gives the place back."""
        ...


@dataclass(eq=False)
class Place:
    engine: Engine
    since: float
    starting: bool = True
    retiring: asyncio.Task[None] | None = None


@dataclass(eq=False, kw_only=True)
class EnginePlaces:
    most: int
    most_starting: int
    quantum: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._taken: list[Place] = []
        self._waiting: dict[Engine, asyncio.Future[Place]] = {}

    async def take(self, engine: Engine) -> Place:
        """Return the engine's place once it may start."""
        turn: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._waiting[engine] = turn
        try:
            while not turn.done():
                self._assign()
                await asyncio.wait({turn}, timeout=_POLL_SECONDS)  # a quantum may end meanwhile
        except asyncio.CancelledError:
            if turn.done():
                self.give_back(turn.result())
            raise
        finally:
            self._waiting.pop(engine, None)
        return turn.result()

    def adopt(self, engine: Engine) -> Place:
        """Return the place of an engine that runs already, of which there may be more than
        `most`."""
        place = Place(engine, since=self.clock())
        self._taken.append(place)
        return place

    def note_started(self, place: Place) -> None:
        """Note that the engine serves, so that another one may start."""
        place.starting, place.since = False, self.clock()
        self._assign()

    def give_back(self, place: Place) -> None:
        self._taken.remove(place)
        self._assign()

    def explain(self, engine: Engine) -> str:
        """Say what an engine that has no place yet waits for; "" if it does not wait."""
        order = self._in_turn()
        if engine not in order:
            return ""
        starting = sum(place.starting for place in self._taken)
        before = order.index(engine)
        why = (
            f"{len(self._taken)} engines run on this machine (TANDEM_MAX_ENGINES)"
            if len(self._taken) >= self.most
            else f"{starting} engines are starting (TANDEM_MAX_STARTING_ENGINES)"
        )
        return f"{why}; {before} engine{'' if before == 1 else 's'} before this one"

    def _in_turn(self) -> list[Engine]:
        held = Counter(place.engine.owner for place in self._taken)
        return sorted(self._waiting, key=lambda engine: held[engine.owner])  # stable: first in

    def _assign(self) -> None:
        """Give free places to those who wait. If none is free, make idle engines retire."""
        while self._waiting and sum(place.starting for place in self._taken) < self.most_starting:
            if len(self._taken) >= self.most:
                self._make_room()
                return
            engine = self._in_turn()[0]
            place = Place(engine, since=self.clock())
            self._taken.append(place)
            self._waiting.pop(engine).set_result(place)

    def _make_room(self) -> None:
        wanted = len(self._waiting) - sum(place.retiring is not None for place in self._taken)
        idle = [
            place
            for place in self._taken
            if place.engine.idle
            and not place.starting
            and place.retiring is None
            and self.clock() - place.since >= self.quantum
        ]
        for place in sorted(idle, key=lambda place: place.engine.used_at)[: max(0, wanted)]:
            place.retiring = asyncio.create_task(place.engine.retire(), name="engine-retires")
