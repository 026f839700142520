"""The table of workers: one row for each worker that should exist.

A row begins with the request for its worker and ends when nothing of the worker is left. Each
change of a row is also one event, kept for seven days. Lease lanes, queue seconds and usage read
events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sqlalchemy import Executable, RowMapping, delete, func, insert, select

from gateway.storage.database import Database
from gateway.storage.tables import drained_groups, worker_events
from gateway.storage.tables import workers as worker_rows
from gateway.workers.requests import WorkerRequest
from tandem.errors import IllegalTransition, StorageFailed

State = Literal[
    "waiting",
    "placed",
    "starting",
    "awake",
    "falling_asleep",
    "asleep",
    "waking",
    "stopping",
    "lost",
    "gone",
]
EndState = Literal["placed", "waiting", "gone"]

OCCUPYING: frozenset[State] = frozenset(
    {"starting", "awake", "falling_asleep", "waking", "stopping", "lost"}
)
WITHOUT_PROCESS: frozenset[State] = frozenset({"waiting", "placed", "gone"})

UNCERTAIN: frozenset[State] = frozenset({"starting", "waking", "falling_asleep", "lost"})
"""States in which the supervisor looks for a worker, unless a step is under way."""


def _states(*states: State) -> frozenset[State]:
    return frozenset(states)


def _or_end(*states: State) -> frozenset[State]:
    return _states(*states, "placed", "waiting", "gone")


TRANSITIONS: Mapping[State, frozenset[State]] = {
    "waiting": _states("placed", "gone"),
    "placed": _states("starting", "waiting", "gone"),
    "starting": _or_end("awake", "stopping", "lost"),
    "awake": _or_end("falling_asleep", "stopping", "lost"),
    "falling_asleep": _or_end("falling_asleep", "asleep", "awake", "stopping", "lost"),
    "asleep": _or_end("waking"),
    "waking": _or_end("awake", "asleep", "stopping", "lost"),
    "stopping": _or_end(),
    "lost": _or_end("awake", "asleep", "stopping"),
    "gone": _states(),
}
"""The states that may follow each state. `placed`, `waiting` and `gone` end a process."""


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    """A worker that should exist.

    `group` is "" while the row waits. `token` is the newest fencing token that its worker may have
    seen. `process` is the id of its process. `reason` explains the state, if it needs that. `since`
    is the start of the state, in seconds since 1970. The row ends with the last of its `holders`.
    `ends_as` is the state after the next end of its process. `overtaken` counts later rows that got
    a group first."""

    request: WorkerRequest
    group: str = ""
    state: State = "waiting"
    token: int = 0
    process: str = ""
    reason: str = ""
    since: float = 0.0
    holders: tuple[str, ...] = ()
    ends_as: EndState = "placed"
    overtaken: int = 0

    @property
    def key(self) -> str:
        return self.request.key

    @property
    def kind(self) -> str:
        return self.request.kind

    @property
    def owner(self) -> str:
        return self.request.owner

    @property
    def session(self) -> str:
        return self.request.session

    @property
    def sessions(self) -> set[str]:
        """The session of its request, and those of the runs that hold it."""
        return {self.session, *(holder.partition(":")[0] for holder in self.holders)}

    @property
    def occupies(self) -> bool:
        """Whether its worker's state may be on its devices."""
        return self.state in OCCUPYING

    @property
    def occupies_until_it_ends(self) -> bool:
        """Whether its end begins with `stopping`. A sleeper stays `asleep` until it has ended."""
        return self.occupies and self.state != "stopping"

    @property
    def has_process(self) -> bool:
        """Whether there may be a process."""
        return self.state not in WITHOUT_PROCESS

    def moved(self, state: State, *, at: float, reason: str = "", **changes: Any) -> WorkerRow:
        """Return the row in another state. Raises `IllegalTransition`."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"worker {self.key} is {self.state} and cannot become {state}")
        return replace(self, state=state, since=at, reason=reason, **changes)

    def ended(self, *, at: float, reason: str = "") -> WorkerRow:
        """Return the row after the end of its process."""
        group = "" if self.ends_as == "waiting" else self.group
        ends_as: EndState = "gone" if self.ends_as == "gone" else "placed"
        return self.moved(
            self.ends_as, at=at, reason=reason, process="", group=group, ends_as=ends_as
        )


@dataclass(frozen=True)
class WorkerEvent:
    """A row after a change. The worker computed for `busy_seconds` in the state that ended."""

    row: WorkerRow
    busy_seconds: float = 0.0


class WorkerTable:
    """Rows and events in the database. Writes take effect in the order of the calls."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._unsettled = 0
        """Statements that are written soon."""

    async def read(self) -> Sequence[WorkerRow]:
        """Return all rows, the oldest first."""
        rows = await self._database.read(select(worker_rows).order_by(worker_rows.c.since))
        return [_row_of(row) for row in rows]

    async def write(self, rows: Sequence[WorkerRow], events: Sequence[WorkerEvent]) -> None:
        """Commit all of this, or nothing. A row that is gone is deleted. Raises `StorageFailed`."""
        if self._unsettled and self._database.postpones:
            raise StorageFailed("earlier writes of workers wait for the storage")
        await self._database.write_together(*self._statements(rows, events), in_order=True)

    def write_soon(self, rows: Sequence[WorkerRow], events: Sequence[WorkerEvent]) -> None:
        """Commit this later, also if the storage fails now."""
        for statement in self._statements(rows, events):
            self._unsettled += 1
            self._database.write_soon(statement, settled=self._note_settled)

    def _note_settled(self) -> None:
        self._unsettled -= 1

    def _statements(
        self, rows: Sequence[WorkerRow], events: Sequence[WorkerEvent]
    ) -> list[Executable]:
        """Return one statement for each row and event, so that a crash in between loses no row."""
        replace_row: Any = self._database.insert_or_replace(worker_rows)
        return [
            *(
                delete(worker_rows).where(worker_rows.c.key == row.key)
                if row.state == "gone"
                else replace_row.values(_values_of(row))
                for row in rows
            ),
            *(insert(worker_events).values(_values_of_event(event)) for event in events),
        ]

    async def busy_seconds(self) -> Mapping[str, float]:
        """Return the device seconds of each owner, from the kept events."""
        seconds = func.sum(worker_events.c.busy_seconds).label("seconds")
        query = select(worker_events.c.owner, seconds).group_by(worker_events.c.owner)
        return {row["owner"]: row["seconds"] for row in await self._database.read(query)}

    async def drained(self) -> Sequence[str]:
        """Return the names of drained groups."""
        rows = await self._database.read(select(drained_groups))
        return [row["name"] for row in rows]

    async def set_drained(self, group: str, *, drained: bool) -> None:
        """Commit whether a group is drained. Raises `StorageFailed`."""
        named = drained_groups.c.name == group
        statements: list[Any] = [delete(drained_groups).where(named)]
        if drained:
            statements.append(insert(drained_groups).values(name=group))
        await self._database.write_together(*statements)


def _values_of(row: WorkerRow) -> dict[str, Any]:
    return _described(row) | {
        "request": row.request.to_json(),
        "token": row.token,
        "process": row.process,
        "since": row.since,
        "holders": list(row.holders),
        "ends_as": row.ends_as,
        "overtaken": row.overtaken,
    }


def _values_of_event(event: WorkerEvent) -> dict[str, Any]:
    return _described(event.row) | {"at": event.row.since, "busy_seconds": event.busy_seconds}


def _described(row: WorkerRow) -> dict[str, Any]:
    """Return the columns that a row and its events have."""
    return {
        "key": row.key,
        "kind": row.kind,
        "owner": row.owner,
        "session_id": row.session,
        "group_name": row.group,
        "state": row.state,
        "reason": row.reason,
    }


def _row_of(row: RowMapping) -> WorkerRow:
    alike = ("state", "token", "process", "reason", "since", "ends_as", "overtaken")
    return WorkerRow(
        request=WorkerRequest.from_json(row["request"]),
        group=row["group_name"],
        holders=tuple(row["holders"]),
        **{name: row[name] for name in alike},
    )
