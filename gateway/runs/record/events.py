"""What happened to a run and its workers, from the events of seven days."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import RowMapping, and_, or_, select

from gateway.runs.record.rows import RunRecord
from gateway.storage.database import Database
from gateway.storage.tables import runs, worker_events

EventKind = Literal["created", "started", "restored", "moved", "slept", "woken", "stopped", "ended"]
_MOST_CHANGES = 5000
_SECONDS_TO_END = 60.0
_WITHOUT_PROCESS = ("waiting", "placed", "gone")


@dataclass(frozen=True)
class RunEvent:
    """`event` happened to `worker`, the run's trainer or job, an engine of its session, or the run
    itself. `group` is the worker's device group."""

    at: float
    event: EventKind
    worker: Literal["trainer", "engine", "job", "run"]
    key: str
    group: str = ""
    reason: str = ""


async def run_events(database: Database, run: RunRecord) -> list[RunEvent]:
    """Return a run's newest events in order. A shared engine's belong to the session that made
    it."""
    host = await database.read_value(select(runs.c.host).where(runs.c.id == run.id))
    of_engine = worker_events.c.key.startswith(
        f"{run.session_id}/{run.base_model}/", autoescape=True
    )
    wanted = or_(
        worker_events.c.key == (host or run.id),
        and_(worker_events.c.session_id == run.session_id, of_engine),
    )
    await database.flush()
    during = worker_events.c.at >= run.created_at
    if run.ended_at is not None:
        during &= worker_events.c.at <= run.ended_at + _SECONDS_TO_END
    newest = select(worker_events).where(wanted, during).order_by(worker_events.c.id.desc())
    found = await database.read(newest.limit(_MOST_CHANGES))
    events = [RunEvent(run.created_at, "created", "run", run.id), *worker_changes(found[::-1])]
    if run.ended_at is not None:
        events.append(RunEvent(run.ended_at, "ended", "run", run.id, reason=run.reason))
    return sorted(events, key=lambda event: event.at)


def worker_changes(rows: Iterable[RowMapping]) -> Iterator[RunEvent]:
    """Yield the changes that rows of `worker_events`, in order, mean for people.

    A trainer that starts again restores its run. A worker moves if it is awake on another group
    than before."""
    before: dict[str, RowMapping] = {}
    groups: dict[str, str] = {}
    for row in rows:
        key, state = row["key"], row["state"]
        last = before.get(key)
        came_from = last["state"] if last is not None else ""
        before[key] = row
        found: list[EventKind] = []
        if state == "awake" and came_from == "starting":
            again = key in groups and row["kind"] == "trainer"
            found.append("restored" if again else "started")
        elif state == "awake" and came_from == "waking":
            found.append("woken")
        elif state == "asleep" and came_from == "falling_asleep":
            found.append("slept")
        elif state in _WITHOUT_PROCESS and came_from not in ("", *_WITHOUT_PROCESS):
            found.append("stopped")
        if state == "awake":
            if groups.get(key, row["group_name"]) != row["group_name"]:
                found.append("moved")
            groups[key] = row["group_name"]
        for event in found:
            reason = row["reason"] or (last["reason"] if event == "stopped" and last else "")
            yield RunEvent(row["at"], event, row["kind"], key, row["group_name"], reason)
