"""The roster: all rows and calls of one gateway in memory, and their writes to the table.

The row in memory is always right. An intention is committed before it is carried out, so after a
crash the table shows a row between two states. Such a row counts as occupying."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from gateway.workers.adapters import WorkerAdapter
from gateway.workers.demand import WorkerCalls
from gateway.workers.groups import WorkerGroup
from gateway.workers.overview import Budgets, Overview
from gateway.workers.table import WorkerEvent, WorkerRow, WorkerTable
from gateway.workers.turns import ROUND_TRIP
from gateway.workers.worker_metrics import WorkerMetrics
from gateway.workers.worker_use import WorkerUseMeter
from tandem.errors import StorageFailed, WorkerDied, WorkerStartFailed
from tandem.settings.sharing import SharingSettings
from tandem.telemetry import get_log

RETRY_SECONDS = 0.5
"""Seconds until a step that the database refused is tried again."""
_TOKEN_BITS = 20
"""Bits of a token that count the steps of one gateway. The bits above are its epoch."""
_RECENT = 0.3
"""The weight of the newest of several measurements."""


class Roster:
    """`clock` returns seconds since 1970. It frees no device. `epoch` is the gateway's.
    `note_state` gets the key and the state of each changed row."""

    def __init__(
        self,
        *,
        table: WorkerTable,
        adapters: Mapping[str, WorkerAdapter[Any]],
        settings: SharingSettings,
        epoch: int,
        clock: Callable[[], float],
        groups: Iterable[WorkerGroup] = (),
        budgets: Budgets | None = None,
        metrics: WorkerMetrics | None = None,
        use: WorkerUseMeter | None = None,
        note_state: Callable[[str, str], None] = lambda _key, _state: None,
    ) -> None:
        self.table = table
        self.groups = {group.name: group for group in groups}
        self.adapters = adapters
        self.settings = settings
        self.budgets = budgets or Budgets()
        self.metrics = metrics
        self.use = use
        self._note_state = note_state
        self.clock = clock
        self.rows: dict[str, WorkerRow] = {}
        self.silent_launchers: dict[str, float] = {}
        """The launchers that do not answer, and the times since when."""
        self.gone: dict[str, asyncio.Future[None]] = {}
        """By released row, a future that is done when nothing is left of the worker."""
        self.told_of_ends: dict[str, Callable[[str, str], None]] = {}
        """By row, the function to call at the end of each of its processes."""
        self._calls: dict[str, WorkerCalls] = {}
        self._change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shares: dict[str, float] = {}
        self._switch_seconds: dict[str, float] = {}
        self.switches: Counter[str] = Counter()
        """By group, the sleeps and wakes since the start."""
        self._tokens = itertools.count((epoch << _TOKEN_BITS) + 1)
        self._log = get_log()

    async def read(self) -> None:
        """Read the rows and events of earlier gateways."""
        for row in await self.table.read():
            self.rows[row.key] = self._in_todays_groups(row)
        for name in await self.table.drained():
            if name in self.groups:
                self.groups[name] = replace(self.groups[name], drained=True)
        for owner, seconds in (await self.table.busy_seconds()).items():
            self._add_share(owner, seconds)

    def _in_todays_groups(self, row: WorkerRow) -> WorkerRow:
        """Return a row that leaves its group if the group is gone or does not suit it. It stays if
        only the group's sharing has changed."""
        if not row.group:
            return row
        if row.group not in self.groups:  # until nothing of its workers is left
            self.groups[row.group] = WorkerGroup(name=row.group, kinds=frozenset(), drained=True)
        suits = self.groups[row.group].suits(replace(row.request, sharing=None))
        return row if suits or row.ends_as == "gone" else replace(row, ends_as="waiting")

    def next_token(self) -> int:
        return next(self._tokens)

    # --- Rows ---------------------------------------------------------------------------------

    def calls_of(self, key: str) -> WorkerCalls:
        if key not in self._calls:
            self._calls[key] = WorkerCalls(clock=self.clock)
        return self._calls[key]

    def on_host(self, row: WorkerRow) -> bool:
        return self.groups[row.group].on_host

    def intend(self, *rows: WorkerRow) -> Callable[[], Awaitable[bool]]:
        """Change rows in memory now. Call and await the result to commit that. If the storage
        fails, it undoes the change and returns False."""
        before = {row.key: self.rows.get(row.key) for row in rows}
        events = self._set(rows)
        return lambda: self._written(rows, before, events)

    async def _written(
        self,
        rows: Iterable[WorkerRow],
        before: Mapping[str, WorkerRow | None],
        events: list[WorkerEvent],
    ) -> bool:
        try:
            await self.table.write([*rows], events)
        except StorageFailed as error:
            self._log.warning("worker_not_written", workers=[*before], reason=error.message)
            for row in rows:
                self._undo(row, before[row.key] or row)
            for event in events:
                if event.row.key in self.rows:
                    self.calls_of(event.row.key).busy_seconds += event.busy_seconds
            return False
        return True

    def _undo(self, row: WorkerRow, before: WorkerRow) -> None:
        """Take a change of state back, but not a release that came meanwhile. The table may have
        the change all the same: by a later write, or since the outcome of the commit is unknown."""
        now = self.rows.get(row.key)
        if now is None:
            return
        self.calls_of(row.key).rests_until = self.clock() + RETRY_SECONDS
        if (now.state, now.token) == (row.state, row.token):
            undone = replace(before, holders=now.holders, ends_as=now.ends_as, request=now.request)
            self.rows[row.key] = undone
            self.table.write_soon([undone], [])

    def note(self, *rows: WorkerRow) -> None:
        """Change rows in memory, and write them soon."""
        self.table.write_soon(rows, self._set(rows))

    def _set(self, rows: Iterable[WorkerRow]) -> list[WorkerEvent]:
        events = []
        for row in rows:
            before = self.rows.get(row.key)
            self.rows[row.key] = row
            if before is None or (before.state, before.group) != (row.state, row.group):
                seconds = 0.0
                if before is not None and before.state == "awake":
                    calls = self.calls_of(row.key)
                    self._add_share(row.owner, calls.running_seconds)
                    seconds = calls.take_busy_seconds()
                events.append(WorkerEvent(row, seconds))
                self._note_state(row.key, row.state)
                if self.metrics is not None:
                    self.metrics.note_state(before, row, self.calls_of(row.key).waited_seconds)
                if self.use is not None:
                    self.use.note_state(row, self.calls_of(row.key).waited_seconds)
            if row.state == "gone":
                self._forget(row.key)
        self._change.set_result(None)
        self._change = asyncio.get_running_loop().create_future()
        return events

    def _forget(self, key: str) -> None:
        del self.rows[key]
        if (calls := self._calls.pop(key, None)) is not None:
            calls.refuse(WorkerDied(f"worker {key} was released"))
        self.told_of_ends.pop(key, None)
        if (gone := self.gone.pop(key, None)) is not None and not gone.done():
            gone.set_result(None)

    def note_ended(self, row: WorkerRow, reason: str) -> None:
        """Note that nothing is left of a row's process."""
        calls, told = self.calls_of(row.key), self.told_of_ends.get(row.key)
        if row.ends_as == "placed":
            calls.rests_until = self.clock() + calls.backoff.failed()
        self.note(row.ended(at=self.clock(), reason=reason))
        calls.note_ended()
        if told is not None:
            told(row.process, reason)
        if row.kind == "job":  # its attempt has ended, and has no other process
            calls.refuse(WorkerStartFailed(reason))

    async def changed(self) -> None:
        """Return when a row has changed."""
        await asyncio.shield(self._change)

    def somebody_waits(self) -> bool:
        """Whether a call of any worker waits, or a row waits for its group."""
        return any(calls.waiting for calls in self._calls.values()) or any(
            row.state == "waiting" and row.kind != "engine" for row in self.rows.values()
        )

    # --- The overview -------------------------------------------------------------------------

    def overview(self, *, busy: Iterable[str] = ()) -> Overview:
        """Return the input of the next decision."""
        return Overview(
            now=self.clock(),
            rows=dict(self.rows),
            groups=dict(self.groups),
            settings=self.settings,
            budgets=self.budgets,
            demand={
                key: self._calls[key].as_demand(silent_for=self._silent_for(row))
                for key, row in self.rows.items()
                if key in self._calls
            },
            bytes={key: calls.bytes for key, calls in self._calls.items() if key in self.rows},
            shares=self._shares_now(),
            switch_seconds=dict(self._switch_seconds),
            busy=frozenset(busy),
            silent=dict(self.silent_launchers),
        )

    def _silent_for(self, row: WorkerRow) -> float:
        return self.adapters[row.kind].silent_for(row) if row.state == "awake" else 0.0

    # --- Shares -------------------------------------------------------------------------------

    def end_use(self, row: WorkerRow, calls: WorkerCalls, *, worked: bool) -> None:
        """End a call of a worker, and count its seconds for the owner."""
        if worked:
            calls.backoff.worked()
        self._add_share(row.owner, calls.end_use())

    def note_active(self, owner: str) -> None:
        """Note that an owner wants devices. It does not catch up for idle time before."""
        active = {row.owner for row in self.rows.values() if self._is_active(row)}
        if owner not in active and active:
            shares = self._shares_now()
            fewest = min(shares.get(other, 0.0) for other in active)
            self._shares[owner] = max(self._shares.get(owner, 0.0), fewest)

    def _is_active(self, row: WorkerRow) -> bool:
        return row.occupies or bool(self.calls_of(row.key).waiting)

    def _add_share(self, owner: str, seconds: float) -> None:
        self._shares[owner] = self._shares.get(owner, 0.0) + seconds / self._weight(owner)

    def _shares_now(self) -> Mapping[str, float]:
        """Return the share of each owner, with the calls that are under way."""
        shares = dict(self._shares)
        for key, row in self.rows.items():
            if key in self._calls and self._calls[key].uses:
                running = self._calls[key].running_seconds / self._weight(row.owner)
                shares[row.owner] = shares.get(row.owner, 0.0) + running
        return shares

    def _weight(self, owner: str) -> float:
        return self.settings.weights.get(owner, 1.0)

    def note_arrival(self, row: WorkerRow) -> None:
        """Note a call, which may begin another step."""
        patience = max(ROUND_TRIP, self._switch_seconds.get(row.group, 0.0))
        self.calls_of(row.key).note_arrival(patience=patience)

    def note_switch(self, row: WorkerRow, direction: str, seconds: float, moved: int) -> None:
        """Note the seconds of a sleep or a wake. A switch consists of both."""
        before = self._switch_seconds.get(row.group, 0.0)
        self._switch_seconds[row.group] = before + _RECENT * (2 * seconds - before)
        self.switches[row.group] += 1
        if self.metrics is not None:
            self.metrics.note_switch(row, direction, seconds, moved)
