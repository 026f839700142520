"""Queries of sessions, active or ended: their owners and contents.

`owned` is what belongs to the caller; `accessible` is what the caller may see (everything, for an
admin). A session that the caller may not see is reported as if it did not exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import RowMapping, Select, select

from gateway.auth.identity import Caller, Scope, visible
from gateway.sessions.metadata import text_metadata
from gateway.storage.database import Database, from_row
from gateway.storage.tables import runs, sampling_sessions, sessions
from tandem.errors import UnknownSession


@dataclass(frozen=True)
class SessionRecord:
    """A row of `sessions`. Times are seconds since 1970."""

    id: str
    state: str
    reason: str
    detail: str
    display_name: str | None
    user_metadata: Mapping[str, str] | None
    project_id: str
    owner: str
    created_at: float


@dataclass(frozen=True)
class SessionContents:
    session: SessionRecord
    run_ids: Sequence[str]
    sampler_ids: Sequence[str]


class SessionQueries:
    def __init__(self, *, database: Database) -> None:
        self._database = database

    async def session(
        self, session_id: str, caller: Caller, *, scope: Scope = "accessible"
    ) -> SessionRecord:
        """Return a session. Raise `UnknownSession`."""
        row = await self._database.read_one(
            select(sessions).where(
                sessions.c.id == session_id, visible(sessions.c.owner, caller, scope)
            )
        )
        if row is None:
            raise UnknownSession(f"there is no session {session_id!r} on this server")
        return session_of(row)

    async def contents(self, session_id: str, caller: Caller, *, scope: Scope) -> SessionContents:
        """Return a session with its runs and sampling sessions, by creation. Raise
        `UnknownSession`."""
        session = await self.session(session_id, caller, scope=scope)
        await self._database.flush()
        run_ids, sampler_ids = [
            await self._ids(
                select(table.c.id)
                .where(table.c.session_id == session_id)
                .order_by(table.c.created_at, table.c.id)
            )
            for table in (runs, sampling_sessions)
        ]
        return SessionContents(session=session, run_ids=run_ids, sampler_ids=sampler_ids)

    async def session_ids(
        self, caller: Caller, *, scope: Scope, limit: int, offset: int
    ) -> list[str]:
        """Return a page of session ids, newest first."""
        return await self._ids(
            select(sessions.c.id)
            .where(visible(sessions.c.owner, caller, scope))
            .order_by(sessions.c.created_at.desc(), sessions.c.id.desc())
            .limit(limit)
            .offset(offset)
        )

    async def _ids(self, query: Select[tuple[str]]) -> list[str]:
        return [row["id"] for row in await self._database.read(query)]


def session_of(row: RowMapping) -> SessionRecord:
    return from_row(SessionRecord, row, user_metadata=text_metadata(row["user_metadata"]))
