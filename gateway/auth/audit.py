"""The audit log: who changed what, from where, and what came of it.

Each request that changes something leaves a row when it has been answered, refused ones too.
Rows hold names, never bodies: no key, no prompt, no weight. An attempt without a good key has
the actor `unknown`, and there are no more rows of these than `UNKNOWN_ROWS` a minute, so that
nobody fills the disk who may do nothing else. The steps of training and samples
are not here; a run's operation log has each of its operations.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import orjson
from sqlalchemy import ColumnElement, delete, insert, or_, select

from gateway.storage.database import Database
from gateway.storage.tables import audit
from tandem.telemetry import without_credentials

_INSERT = insert(audit)
_MOST_ENTRIES = 10_000
"""Of one answer, newest kept: what a busy day can have must not fill the gateway's memory."""

UNKNOWN = "unknown"
"""The actor of an attempt without a good key."""
UNKNOWN_ROWS = 120
"""Such attempts that a minute leaves rows of; what is more is counted in the metrics alone."""

RESOURCES: Mapping[str, Sequence[str]] = {
    "checkpoints": ("checkpoint",),
    "projects": ("project",),
    "teams": ("team",),
    "organizations": ("organization", "apikey", "model"),
}
"""What the SDK's event types stand for: the first word of an action."""


@dataclass(frozen=True)
class Entry:
    """`at` in seconds since 1970; `action` is RESOURCE_VERB; `target` a path or an id."""

    at: float
    actor: str
    action: str
    target: str
    address: str
    status: int
    detail: Mapping[str, str]


class AuditLog:
    def __init__(self, *, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._minute = 0
        self._unknown = 0

    def record_unknown(
        self, *, action: str, target: str, address: str, status: int, reason: str
    ) -> None:
        """As `record`, for an attempt by nobody who is known."""
        minute = int(self._clock() // 60)
        if minute != self._minute:
            self._minute, self._unknown = minute, 0
        self._unknown += 1
        if self._unknown <= UNKNOWN_ROWS:
            self.record(
                actor=UNKNOWN,
                action=action,
                target=target,
                address=address,
                status=status,
                detail={"reason": reason},
            )

    def record(
        self,
        *,
        actor: str,
        action: str,
        target: str,
        address: str,
        status: int,
        detail: Mapping[str, str],
    ) -> None:
        """Writes a row, behind the request that it tells of."""
        self._database.write_soon(
            _INSERT,
            {
                "at": time.time(),
                "actor": actor[:100],
                "action": action[:64],
                "target": without_credentials(target)[:300],
                "address": address[:64],
                "status": status,
                "detail": orjson.dumps(dict(detail)).decode() if detail else "",
            },
        )

    async def of_day(self, *, day: dt.date, event_type: str) -> list[Entry]:
        """The day's entries (midnight to midnight UTC), oldest first; `event_type` "all" or a
        key of `RESOURCES`."""
        await self._database.flush()
        start = dt.datetime.combine(day, dt.time(), tzinfo=dt.UTC).timestamp()
        wanted: list[ColumnElement[bool]] = [audit.c.at >= start, audit.c.at < start + 86_400]
        if event_type != "all":
            wanted.append(
                or_(
                    *(
                        audit.c.action.startswith(f"{resource}_", autoescape=True)
                        for resource in RESOURCES[event_type]
                    )
                )
            )
        rows = await self._database.read(
            select(audit).where(*wanted).order_by(audit.c.id.desc()).limit(_MOST_ENTRIES)
        )
        return [
            Entry(
                at=row["at"],
                actor=row["actor"],
                action=row["action"],
                target=row["target"],
                address=row["address"],
                status=row["status"],
                detail=orjson.loads(row["detail"]) if row["detail"] else {},
            )
            for row in reversed(rows)
        ]

    def forget_before(self, cutoff: float) -> None:
        self._database.write_soon(delete(audit).where(audit.c.at < cutoff))
