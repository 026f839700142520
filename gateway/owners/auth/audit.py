"""The audit log of changing requests.

Each changing request leaves a row after its answer, even if refused. Rows contain names, never
bodies or keys. An attempt without a valid key has the actor `unknown` and at most `UNKNOWN_ROWS`
rows a minute, so that strangers cannot fill the disk. Samples and training steps are not audited.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import orjson
from sqlalchemy import ColumnElement, insert, or_, select

from gateway.owners.auth.identity import urn_of
from gateway.owners.auth.keys import LOCAL_OWNER
from gateway.storage.database import Database, from_row
from gateway.storage.tables import audit
from tandem.telemetry import without_credentials

_INSERT = insert(audit)
_MAX_ENTRIES = 10_000
"""Newest entries of a day in one answer, which bounds memory."""

UNKNOWN = "unknown"
UNKNOWN_ROWS = 120
"""Rows per minute for such attempts. Metrics count all of them."""

RESOURCES: Mapping[str, Sequence[str]] = {
    "checkpoints": ("checkpoint",),
    "projects": ("project",),
    "teams": ("team",),
    "organizations": ("organization", "apikey", "model", "group"),
}
"""The SDK's event types, each with the first words of its actions."""


@dataclass(frozen=True)
class Entry:
    """`action` is RESOURCE_VERB. `target` is a path or an id. `at` is in seconds since 1970."""

    actor: str
    action: str
    target: str
    address: str
    status: int
    detail: Mapping[str, str]
    at: float = field(default_factory=time.time)

    @classmethod
    def of_local(cls, action: str, target: str, **detail: str) -> Entry:
        """Return an entry for a change on the gateway's machine, which has no address."""
        return cls(urn_of(LOCAL_OWNER), action, target, address="", status=200, detail=detail)


class AuditLog:
    def __init__(self, *, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._minute = 0
        self._unknown = 0

    def record(self, entry: Entry) -> None:
        """Queue a row without waiting. Rows of the actor `UNKNOWN` are limited per minute."""
        if entry.actor == UNKNOWN:
            minute = int(self._clock() // 60)
            if minute != self._minute:
                self._minute, self._unknown = minute, 0
            self._unknown += 1
            if self._unknown > UNKNOWN_ROWS:
                return
        row = {
            **vars(entry),
            "target": without_credentials(entry.target)[:300],
            "address": entry.address[:64],
            "detail": orjson.dumps(dict(entry.detail)).decode() if entry.detail else "",
        }
        self._database.write_soon(_INSERT, row)

    async def of_day(self, *, day: dt.date, event_type: str) -> list[Entry]:
        """Return the day's entries (UTC), oldest first. `event_type` is "all" or a key of
        `RESOURCES`."""
        await self._database.flush()
        start = dt.datetime.combine(day, dt.time(), tzinfo=dt.UTC).timestamp()
        wanted: list[ColumnElement[bool]] = [audit.c.at >= start, audit.c.at < start + 86_400]
        if event_type != "all":
            prefixes = [f"{resource}_" for resource in RESOURCES[event_type]]
            wanted.append(or_(*(audit.c.action.startswith(p, autoescape=True) for p in prefixes)))
        rows = await self._database.read(
            select(audit).where(*wanted).order_by(audit.c.id.desc()).limit(_MAX_ENTRIES)
        )
        return [
            from_row(Entry, row, detail=orjson.loads(row["detail"] or "{}"))
            for row in reversed(rows)
        ]
