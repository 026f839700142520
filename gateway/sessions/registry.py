"""The active sessions. A session is one client's connection, alive while heartbeats arrive."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import insert, select, update

from gateway.identifiers import new_session_id
from gateway.limits.quotas import Quotas
from gateway.sessions.metadata import text_metadata
from gateway.storage.database import Database, from_row
from gateway.storage.tables import runs, sessions
from tandem.errors import SessionFinished

_REMEMBERED = 10_000
"""Ended sessions whose owner is remembered without a query to the database."""


@dataclass(frozen=True)
class NewSession:
    """What a client says about its session. `sdk_version` is only recorded. A session with a
    `ttl` has no heartbeats and ends so many seconds after its last request."""

    owner: str
    project_id: str = ""
    display_name: str | None = None
    user_metadata: Mapping[str, object] | None = None
    tags: Sequence[str] = ()
    sdk_version: str = ""
    ttl: float | None = None


@dataclass
class Session:
    id: str
    created_at: float
    display_name: str | None
    owner: str
    project_id: str = ""
    ttl: float | None = None
    seen_at: float = field(default_factory=time.monotonic)


class SessionRegistry:
    """`ttl` is in seconds. Sessions survive a restart of the gateway, which restarts their
    clocks."""

    def __init__(self, *, database: Database, limits: Quotas, ttl: float) -> None:
        self._database = database
        self._limits = limits
        self._ttl = ttl
        self._active: dict[str, Session] = {}
        self._past_owners: OrderedDict[str, str] = OrderedDict()

    async def open(self) -> None:
        for row in await self._database.read(select(sessions).where(sessions.c.state == "active")):
            self._active[row["id"]] = from_row(Session, row)

    def all(self) -> list[Session]:
        return list(self._active.values())

    async def create(self, new: NewSession) -> Session:
        """Raise `LimitExceeded` if the owner has as many sessions as are allowed."""
        self._limits.check("sessions", used=sum(s.owner == new.owner for s in self.all()))
        session = Session(
            id=new_session_id(),
            created_at=time.time(),
            display_name=new.display_name,
            owner=new.owner,
            project_id=new.project_id,
            ttl=new.ttl,
        )
        # Before the row is written, so that concurrent requests count for each other's limit.
        self._active[session.id] = session
        row = {
            "id": session.id,
            "state": "active",
            "display_name": new.display_name,
            "user_metadata": text_metadata(new.user_metadata),
            "tags": list(new.tags),
            "project_id": new.project_id,
            "owner": new.owner,
            "sdk_version": new.sdk_version,
            "created_at": session.created_at,
        }
        try:
            await self._database.write(insert(sessions), row)
        except BaseException:
            self._active.pop(session.id, None)
            raise
        return session

    def get(self, session_id: str) -> Session | None:
        """Return the session if it is active. Does not count as a sign of life."""
        return self._active.get(session_id)

    def require(self, session_id: str) -> Session:
        """Return the session, or raise `SessionFinished` if it has ended. Call it after a wait,
        before starting anything that only the end of the session stops."""
        session = self._active.get(session_id)
        if session is None:
            raise SessionFinished(f"session {session_id} has ended; make a new ServiceClient")
        return session

    def owner_of(self, session_id: str) -> str:
        """Return the owner of a session, also for some time after its end, when its last usage is
        counted; later an empty text."""
        session = self._active.get(session_id)
        return session.owner if session is not None else self._past_owners.get(session_id, "")

    def count_of(self, owner: str, session_ids: Iterable[str]) -> int:
        """Return how many of the ids belong to active sessions of the owner."""
        sessions = map(self._active.get, session_ids)
        return sum(session is not None and session.owner == owner for session in sessions)

    async def assign_project(self, *, session_id: str, project_id: str) -> None:
        """Move a session, active or ended, into a project with all its runs."""
        await self._database.write_together(
            update(sessions).where(sessions.c.id == session_id).values(project_id=project_id),
            update(runs).where(runs.c.session_id == session_id).values(project_id=project_id),
        )
        if (session := self._active.get(session_id)) is not None:
            session.project_id = project_id

    def touch(self, session_id: str) -> Session | None:
        """Record a sign of life. Return None for a session that is not active."""
        session = self._active.get(session_id)
        if session is not None:
            session.seen_at = time.monotonic()
        return session

    def overdue(self) -> list[Session]:
        """Return the sessions whose last sign of life is older than their ttl."""
        now = time.monotonic()
        return [s for s in self._active.values() if now - s.seen_at > (s.ttl or self._ttl)]

    async def end(self, *, session_id: str, state: str, reason: str, detail: str) -> bool:
        """End the session. Return False if it had ended before: the first reason counts."""
        session = self._active.pop(session_id, None)
        if session is None:
            return False
        self._past_owners[session_id] = session.owner
        if len(self._past_owners) > _REMEMBERED:
            self._past_owners.popitem(last=False)
        await self._database.write(
            update(sessions)
            .where(sessions.c.id == session_id)
            .values(state=state, reason=reason, detail=detail, ended_at=time.time())
        )
        return True

    def expired_reason(self, session: Session) -> str:
        if session.ttl is not None:
            return f"no request for {session.ttl:g} s"
        return f"no heartbeat for {self._ttl:g} s"


def why_ended(session_id: str, *, reason: str, detail: str) -> str:
    """Literal example: "session s-ab12 has ended (expired: no heartbeat for 60 s); make a …"."""
    more = f": {detail}" if detail else ""
    return f"session {session_id} has ended ({reason}{more}); make a new ServiceClient"
