"""The overview: the input of a decision about workers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from gateway.workers.groups import WorkerGroup
from gateway.workers.table import WorkerRow
from tandem.settings.sharing import SharingSettings

Way = Literal["host", "disk", "drop"]
"""Where the state of a sleeper goes. A dropped state is loaded again."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The calls of one worker. Times are seconds since 1970, and 0.0 is never.

    `uses` calls are under way. Calls took `used_seconds` in all, and `step_seconds` from one pause
    of the client to the next. `waiting` calls wait, the oldest since `waiting_since`. In an
    `open_step`, gradients wait for their optimizer step. `idle_since` is the end of the last call,
    `started_at` the start of its process, and `served_at` the last time when the worker gave up its
    devices. A `yielding` worker admits no new call. A silent worker has not answered since
    `silent_since`. `rests_until` delays its next step after a failure. After a sleep without room
    the worker stays awake until `stays_until`. The first such sleep was at `refused_at`. A job that
    `keeps_devices` is not asked to sleep, because an attempt of it has ended in a sleep."""

    uses: int = 0
    used_seconds: float = 0.0
    step_seconds: float = 0.0
    waiting: int = 0
    waiting_since: float = 0.0
    open_step: bool = False
    idle_since: float = 0.0
    served_at: float = 0.0
    started_at: float = 0.0
    yielding: bool = False
    silent_since: float = 0.0
    rests_until: float = 0.0
    stays_until: float = 0.0
    refused_at: float = 0.0
    keeps_devices: bool = False

    @property
    def idle(self) -> bool:
        return not self.uses and not self.waiting


@dataclass(frozen=True, kw_only=True)
class WorkerBytes:
    """The memory of one worker on all its devices, on the host and on disk, by its last answer.

    Before its first answer, it is not `measured`. `awake` is its device memory when it was last
    awake, and `way` the way of its sleep. A sleep under way may take the reserved bytes."""

    device: int = 0
    host: int = 0
    disk: int = 0
    measured: bool = False
    awake: int = 0
    way: Way | None = None
    reserved_host: int = 0
    reserved_disk: int = 0


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Limits of the machine. `host_bytes` bounds the host memory of all workers together, where 0
    is no limit. `disk_bytes` are free for the state of sleepers. At most `starts` workers of a host
    start at once. After `silence` seconds without an answer, a worker is killed. Calls of an engine
    fail after `patience` seconds in which nobody could serve them."""

    host_bytes: int = 0
    disk_bytes: int = 0
    starts: int = 4
    silence: float = 60.0
    patience: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Overview:
    """`busy` has the keys of rows with a step under way. `shares` has the device seconds of each
    owner, divided by its weight. `switch_seconds` is the recent cost of a switch in each group. The
    launchers in `silent` have not answered since these times."""

    now: float
    rows: Mapping[str, WorkerRow]
    groups: Mapping[str, WorkerGroup]
    settings: SharingSettings
    budgets: Budgets = Budgets()
    demand: Mapping[str, Demand] = field(default_factory=dict)
    bytes: Mapping[str, WorkerBytes] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    switch_seconds: Mapping[str, float] = field(default_factory=dict)
    busy: frozenset[str] = frozenset()
    silent: Mapping[str, float] = field(default_factory=dict)

    def on(self, group: WorkerGroup) -> Sequence[WorkerRow]:
        """Return the rows of a group."""
        return self._by_group.get(group.name, ())

    @cached_property
    def _by_group(self) -> Mapping[str, Sequence[WorkerRow]]:
        found: dict[str, list[WorkerRow]] = {}
        for row in self.rows.values():
            found.setdefault(row.group, []).append(row)
        return found

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The number of each row, in the order of their requests."""
        return {key: number for number, key in enumerate(self.rows)}

    def group_of(self, row: WorkerRow) -> WorkerGroup:
        return self.groups[row.group]

    def demand_of(self, row: WorkerRow) -> Demand:
        return self.demand.get(row.key, _NO_DEMAND)

    def bytes_of(self, row: WorkerRow) -> WorkerBytes:
        return self.bytes.get(row.key, _NO_BYTES)

    @cached_property
    def starting(self) -> Counter[str]:
        """By host, the number of workers that are starting."""
        rows = (row for row in self.rows.values() if row.state == "starting")
        return Counter(self.group_of(row).host for row in rows)

    # --- Bytes --------------------------------------------------------------------------------

    def left_on_device(self, row: WorkerRow) -> int:
        """Return the bytes that a sleeper leaves on each of its devices.

        An engine cannot measure its own bytes beside those of others, so only its context
        counts."""
        group = self.group_of(row)
        if group.on_host:
            return 0
        leaves_state = row.state == "asleep" and row.kind != "engine"
        state = self.bytes_of(row).device if leaves_state else 0
        return group.context_bytes + state // row.request.ranks

    @cached_property
    def left_on_devices(self) -> Counter[str]:
        """By group, the bytes on each device that its workers would leave if all slept."""
        left: Counter[str] = Counter()
        for row in self.rows.values():
            if row.has_process:
                left[row.group] += self.left_on_device(row)
        return left

    def host_bytes(self, row: WorkerRow) -> int:
        """Return a worker's host memory, with the bytes that its present step may take."""
        if not row.has_process:
            return 0
        said, on_host = self.bytes_of(row), self.group_of(row).on_host
        has = row.request.host_bytes
        if said.measured:
            has = said.host + (said.device if on_host else 0)
        if on_host and row.occupies:
            has = max(has, self.awake_bytes(row))
        return max(has, said.reserved_host)

    def awake_bytes(self, row: WorkerRow) -> int:
        """Return the host memory of an awake worker on cores."""
        return self.bytes_of(row).awake or row.request.host_bytes

    @cached_property
    def host_bytes_in_use(self) -> int:
        return sum(self.host_bytes(row) for row in self.rows.values())

    # --- Changes ------------------------------------------------------------------------------

    def is_kept(self, row: WorkerRow) -> bool:
        """Whether a placed trainer keeps this engine."""
        return row.key in self._kept

    @cached_property
    def _kept(self) -> frozenset[str]:
        keepers = (row for row in self.rows.values() if row.group and row.kind != "engine")
        return frozenset(key for row in keepers for key in row.request.together)

    def with_rows(self, rows: Sequence[WorkerRow]) -> Overview:
        """Return the overview after rows have changed."""
        return replace(self, rows={**self.rows, **{row.key: row for row in rows}})

    def with_demand(self, row: WorkerRow, demand: Demand) -> Overview:
        """Return the overview after the calls of a worker have changed."""
        return replace(self, demand={**self.demand, row.key: demand})

    def while_ending(self, row: WorkerRow) -> Overview:
        """Return the overview while a worker ends. A sleeper has freed its devices already."""
        rows = [row.moved("stopping", at=self.now)] if row.occupies_until_it_ends else []
        return replace(self.with_rows(rows), busy=self.busy | {row.key})


_NO_DEMAND = Demand()
_NO_BYTES = WorkerBytes()
