"""Holdings: the workers of each holder.

A row exists while somebody holds it: a run its trainer, a sampler its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile

from gateway.workers.loop import DecisionLoop
from gateway.workers.placing import find_groups
from gateway.workers.requests import WorkerRequest
from gateway.workers.table import WorkerRow
from tandem.errors import InvalidRequest, NoRoom, StorageFailed, WorkerDied
from tandem.settings.sharing import Sharing

_MAKING_ROOM = 30.0
"""Seconds of patience for the end of engines without calls."""
_LOOK_SECONDS = 0.05
"""Between two looks at rows that wait for their groups."""


class Holdings:
    """The part of the supervisor for holders: it writes rows, and waits for their groups and for
    their ends."""

    def __init__(self, loop: DecisionLoop) -> None:
        self.loop = loop
        self.roster = loop.roster
        self.runner = loop.runner
        self._event_loop = asyncio.get_running_loop()

    def check(self, requests: Sequence[WorkerRequest]) -> None:
        """Raise `InvalidRequest` for requests that empty groups cannot serve."""
        overview = self.roster.overview()
        groups = {name: replace(each, drained=False) for name, each in overview.groups.items()}
        empty = replace(overview, rows={}, silent={}, groups=groups)
        found = find_groups(empty, [WorkerRow(request=request) for request in requests])
        if isinstance(found, str):
            raise InvalidRequest(f"there can be no place for it: {found}")

    async def place(self, requests: Sequence[WorkerRequest], *, holder: str) -> None:
        """Write a row for each request, and return when all are durable.

        Rows that exist get one more holder. Raises `InvalidRequest` for requests that empty groups
        cannot serve, and `StorageFailed`."""
        self.check(requests)
        keys = [request.key for request in requests]
        while ending := [key for key in keys if self._ends(key)]:
            await self.gone(ending[0])
        coming_back = self._leaving_of(holder, keys)
        now, rows = self.roster.clock(), list[WorkerRow]()
        for request in requests:
            row = self.roster.rows.get(request.key) or WorkerRow(request=request, since=now)
            if holder not in row.holders:
                others = tuple(each for each in row.holders if each != _leaving(holder))
                rows.append(replace(row, holders=(*others, holder)))
        new = [row.key for row in rows if row.key not in self.roster.rows]
        with self.runner.holding(new):
            durable = not rows or await self.roster.intend(*rows)()
        if not durable:
            self._take_back(holder, [row.key for row in rows], coming_back)
            raise StorageFailed("the database did not take the request for workers; try again")
        self.loop.poke()

    async def release(self, key: str, *, holder: str) -> None:
        """Let go of a worker. After its last holder, return when nothing of it is left. It also
        ends if the caller is cancelled."""
        self.let_go(key, holder=holder)
        if self._ends(key):
            await self.gone(key)

    def _ends(self, key: str) -> bool:
        row = self.roster.rows.get(key)
        return row is not None and row.ends_as == "gone"

    async def resize(
        self,
        holder: str,
        requests: Sequence[WorkerRequest],
        *,
        within: float,
        keeping: Collection[str] = (),
    ) -> None:
        """Make these the holder's engines. New ones get their groups at one moment.

        If that does not happen `within` seconds, nothing changes. All other engines are released,
        except those in `keeping`. These leave: the holder takes their calls back and releases them,
        or the next gateway does. Raises `NoRoom`, `InvalidRequest` and `StorageFailed`."""
        self.check(requests)
        wanted = [request.key for request in requests]
        held = self.held_by(holder)
        new = [request for request in requests if request.key not in held]
        together = tuple(request.key for request in new)
        new = [replace(request, together=together) for request in new]
        coming_back = self._leaving_of(holder, together)
        await self.place(new, holder=holder)
        try:
            await self._placed(together, within=within)
            await self._let_leave([key for key in held if key not in wanted], holder, keeping)
        except BaseException:
            self._take_back(holder, together, coming_back)
            raise
        for row in self.roster.rows.values():
            if row.kind != "engine" and not set(row.request.together).isdisjoint(held):
                others = [key for key in row.request.together if key not in held]
                request = replace(row.request, together=(*others, *wanted))
                self.roster.note(replace(row, request=request))

    def set_sharing(self, holder: str, sharing: Sharing | None) -> None:
        """Let others share the devices of a holder's engines in this way."""
        for key in self.held_by(holder):
            row = self.roster.rows[key]
            self.roster.note(replace(row, request=replace(row.request, sharing=sharing)))
        self.loop.poke()

    def _leaving_of(self, holder: str, keys: Sequence[str]) -> list[str]:
        """Return the keys of rows that the holder lets leave."""
        rows = self.roster.rows
        return [key for key in keys if key in rows and _leaving(holder) in rows[key].holders]

    def _take_back(self, holder: str, keys: Sequence[str], coming_back: Collection[str]) -> None:
        """Let go of rows for which something failed. Rows that were coming back leave again."""
        self.roster.note(*self._renamed(coming_back, holder, _leaving(holder)))
        for key in keys:
            if key not in coming_back:
                self.let_go(key, holder=holder)

    async def _let_leave(self, keys: Sequence[str], holder: str, keeping: Collection[str]) -> None:
        """Release engines, or note that they leave. Return when that is durable."""
        kept = [key for key in keys if key in keeping]
        leaving = self._renamed(kept, holder, _leaving(holder))
        if leaving and not await self.roster.intend(*leaving)():
            self.roster.note(*self._renamed(kept, _leaving(holder), holder))
            raise StorageFailed("the database did not take the number of engines; try again")
        for key in keys:
            if key not in keeping:
                self.let_go(key, holder=holder)

    def _renamed(self, keys: Iterable[str], before: str, after: str) -> list[WorkerRow]:
        """Return rows with another name of a holder."""
        rows = [self.roster.rows[key] for key in keys if key in self.roster.rows]
        return [
            replace(row, holders=tuple(after if each == before else each for each in row.holders))
            for row in rows
        ]

    def held_by(self, holder: str) -> list[str]:
        """Return the keys of the rows of a holder."""
        return [row.key for row in self.roster.rows.values() if holder in row.holders]

    async def _placed(self, keys: Sequence[str], *, within: float) -> None:
        """Wait until these rows have groups. Raises `NoRoom`."""
        turns = {key: self.roster.calls_of(key).wait() for key in keys}
        began = self._event_loop.time()
        self.loop.poke()
        try:
            while not all(self._has_group(key) for key in keys):
                waited = self._event_loop.time() - began
                making_room = self._is_making_room(keys) and waited < _MAKING_ROOM
                if waited >= within and not making_room:
                    raise self._no_room(keys)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await self.roster.changed()
        finally:
            for key, turn in turns.items():
                turn.cancel()
                self.roster.calls_of(key).give_up(turn)

    def _has_group(self, key: str) -> bool:
        """Whether a row has a group. Raises `WorkerDied` if the row is gone."""
        if key not in self.roster.rows:
            raise WorkerDied(f"worker {key} was released")
        return bool(self.roster.rows[key].group)

    def _is_making_room(self, keys: Sequence[str]) -> bool:
        """Whether a decision about these rows will follow, or engines end for others."""
        if self.loop.poked or not self.runner.busy.isdisjoint(keys):
            return True
        return any(row.ends_as == "waiting" for row in self.roster.rows.values())

    def _no_room(self, keys: Sequence[str]) -> NoRoom:
        reason = self.loop.explain(keys[0])
        why = f": {reason.reason}" if reason is not None else ""
        what = "engine needs" if len(keys) == 1 else "engines need"
        return NoRoom(
            f"{len(keys)} more {what} a place, and there is room for {self._room_for(keys)}{why}. "
            "Nothing has changed. Ask for fewer, wait for others to end (`tandem top` shows them), "
            "or declare more groups (TANDEM_GROUPS)"
        )

    def _room_for(self, keys: Sequence[str]) -> int:
        """Return how many of these rows could have a group."""
        overview = self.roster.overview()
        rows = [self.roster.rows[key] for key in keys]
        fits = (isinstance(find_groups(overview, rows[:n]), tuple) for n in range(1, len(rows)))
        return sum(takewhile(bool, fits))

    def let_go(self, key: str, *, holder: str) -> None:
        """Let go of a worker, and do not wait for its end."""
        row, names = self.roster.rows.get(key), (holder, _leaving(holder))
        if row is None or not set(names).intersection(row.holders):
            return
        holders = tuple(each for each in row.holders if each not in names)
        row = replace(row, holders=holders, ends_as=row.ends_as if holders else "gone")
        self.roster.note(row)
        if not holders:
            self.roster.calls_of(key).refuse(WorkerDied(f"worker {key} was released"))
        self.loop.poke()

    async def gone(self, key: str) -> None:
        """Return when there is no row of this key."""
        if key in self.roster.rows:
            gone = self.roster.gone.setdefault(key, self._event_loop.create_future())
            await asyncio.shield(gone)


def _leaving(holder: str) -> str:
    """Return the name of a holder in its leaving rows."""
    return f"{holder} (leaving)"
