"""Active sessions: client connections that live by heartbeats.

Metadata from clients is bounded, because lists show it in hundreds of rows."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from pydantic import AfterValidator
from sqlalchemy import Executable, insert, select, update

from gateway.identifiers import new_session_id
from gateway.owners.limits import Quotas
from gateway.storage.database import Database, from_row
from gateway.storage.tables import runs, sessions
from tandem.errors import SessionFinished
from tandem.telemetry import get_log

_MAX_CHARACTERS = 2**14
_STANDSTILL = 5.0
"""Seconds. After a longer gap, this process or its machine was stopped."""

_Content = TypeVar("_Content", bound=Mapping[str, object])


def _bounded(metadata: _Content) -> _Content:
    size = len(json.dumps(metadata, ensure_ascii=False))
    if size > _MAX_CHARACTERS:
        raise ValueError(f"it has {size} characters as JSON, {_MAX_CHARACTERS} at most")
    return metadata


def _as_text(metadata: Mapping[str, object]) -> dict[str, str] | None:
    return {
        key: value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        for key, value in metadata.items()
    } or None


def _bounded_beside_config(metadata: _Content) -> _Content:
    _bounded({key: value for key, value in metadata.items() if key != "config"})
    return metadata


TextMetadata = Annotated[dict[str, str], AfterValidator(_bounded)]
Metadata = Annotated[dict[str, object], AfterValidator(_bounded), AfterValidator(_as_text)]
"""Old clients also send values that are not text. They become JSON."""
RunMetadata = Annotated[
    dict[str, object], AfterValidator(_bounded_beside_config), AfterValidator(_as_text)
]
"""The configuration of a run has its own bound (`gateway.runs.record.identity`)."""


@dataclass(frozen=True)
class NewSession:
    owner: str
    project_id: str = ""
    display_name: str | None = None
    user_metadata: Mapping[str, object] | None = None
    tags: Sequence[str] = ()
    sdk_version: str = ""


@dataclass
class Session:
    """A session with a `ttl` has no heartbeats and ends this many seconds after its last request.
    The `ttl` of a job's session is endless. `heard` is set by the client's first request to this
    gateway. `sdk_version` is empty for the gateway's own sessions. `engine_ranges` has the least
    and most engines of scaled samplers by key, None for a fixed number."""

    id: str
    created_at: float
    display_name: str | None
    owner: str
    project_id: str = ""
    sdk_version: str = ""
    user_metadata: Mapping[str, object] | None = None
    engine_ranges: Mapping[str, Sequence[int] | None] | None = None
    ttl: float | None = None
    seen_at: float = field(default_factory=time.monotonic)
    heard: asyncio.Event = field(default_factory=asyncio.Event)


class SessionRegistry:
    """`ttl` is in seconds. A closed connection does not end a session, because a proxy may restart.
    A restart of the gateway keeps sessions and restarts their clocks."""

    def __init__(self, *, database: Database, limits: Quotas, ttl: float) -> None:
        self._database = database
        self._limits = limits
        self._ttl = ttl
        self._active: dict[str, Session] = {}
        self._ran_at = time.monotonic()
        self._log = get_log()

    async def read_sessions(self) -> None:
        for row in await self._database.read(select(sessions).where(sessions.c.state == "active")):
            self._active[row["id"]] = from_row(Session, row)

    def all(self) -> list[Session]:
        return list(self._active.values())

    async def create(
        self,
        new: NewSession,
        *,
        ttl: float | None = None,
        session_id: str = "",
        beside: Sequence[Executable] = (),
    ) -> Session:
        """Create a session, and execute statements in the same transaction. Raises
        `LimitExceeded`."""
        used = sum(s.owner == new.owner for s in self.all())
        self._limits.check("sessions", owner=new.owner, used=used)
        row = {
            **vars(new),
            "id": session_id or new_session_id(),
            "state": "active",
            "created_at": time.time(),
        }
        session = from_row(Session, row, ttl=ttl)
        session.heard.set()
        # Before the write, so that concurrent requests count toward the limit.
        self._active[session.id] = session
        try:
            if beside:
                made = insert(sessions).values(row)
                await self._database.write_together(made, *beside, durable=True)
            else:
                await self._database.write(insert(sessions), row)
        except BaseException:
            self._active.pop(session.id, None)
            raise
        return session

    def get(self, session_id: str) -> Session | None:
        """Return the session if it is active, without counting as activity."""
        return self._active.get(session_id)

    def require(self, session_id: str) -> Session:
        """Return the session. Raises `SessionFinished`. Call it after a wait, before starting
        anything that only the session's end stops."""
        if (session := self._active.get(session_id)) is None:
            raise SessionFinished(f"session {session_id} has ended; make a new ServiceClient")
        return session

    def count_of(self, owner: str, session_ids: Iterable[str]) -> int:
        sessions = map(self._active.get, session_ids)
        return sum(session is not None and session.owner == owner for session in sessions)

    async def assign_project(self, *, session_id: str, project_id: str) -> None:
        await self._database.write_together(
            update(sessions).where(sessions.c.id == session_id).values(project_id=project_id),
            update(runs).where(runs.c.session_id == session_id).values(project_id=project_id),
        )
        if (session := self._active.get(session_id)) is not None:
            session.project_id = project_id

    async def set_engine_range(
        self, session_ids: Iterable[str], sampler: str, allowed: Sequence[int] | None
    ) -> None:
        """Note the range of a sampler's engines in its active sessions."""
        found = [session for each in session_ids if (session := self._active.get(each))]
        for session in found:
            session.engine_ranges = {**(session.engine_ranges or {}), sampler: allowed}
        await self._database.write_together(
            *(
                update(sessions)
                .where(sessions.c.id == session.id)
                .values(engine_ranges=session.engine_ranges)
                for session in found
            )
        )

    def touch(self, session_id: str) -> Session | None:
        """Record activity. Return None for an inactive session."""
        if (session := self._active.get(session_id)) is not None:
            session.seen_at = time.monotonic()
            session.heard.set()
        return session

    def note_running(self) -> None:
        """Note that the gateway runs; call it several times a second. Time without a call does not
        count as clients' silence."""
        now = time.monotonic()
        gap, self._ran_at = now - self._ran_at, now
        if gap > _STANDSTILL:
            self._log.warning("stood_still", seconds=round(gap, 1))
            for session in self._active.values():
                session.seen_at = min(now, session.seen_at + gap)

    def overdue(self) -> dict[str, str]:
        """Return the ids of silent sessions, each with a sentence about the reason."""
        self.note_running()
        now = time.monotonic()
        return {
            s.id: f"no {'heartbeat' if s.ttl is None else 'request'} for {s.ttl or self._ttl:g} s"
            for s in self._active.values()
            if now - s.seen_at > (s.ttl or self._ttl)
        }

    async def end(self, *, session_id: str, state: str, reason: str, detail: str) -> None:
        """End the session; only the first call counts. While the storage fails, the end is recorded
        later."""
        if self._active.pop(session_id, None) is None:
            return
        self._database.write_soon(
            update(sessions)
            .where(sessions.c.id == session_id)
            .values(state=state, reason=reason, detail=detail, ended_at=time.time())
        )
        await self._database.flush()


def why_ended(session_id: str, *, reason: str, detail: str) -> str:
    """Example: "session s-ab12 has ended (expired: no heartbeat for 60 s); make a …"."""
    more = f": {detail}" if detail else ""
    return f"session {session_id} has ended ({reason}{more}); make a new ServiceClient"
