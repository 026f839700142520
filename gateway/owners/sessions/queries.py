"""Queries of active and ended sessions, in pages.

The scope `owned` means the caller's sessions, `accessible` all that the caller may see. Others
appear not to exist. Names, metadata and states are compared here, in chunks, because databases
treat case and JSON differently. A cursor marks the next page and is signed together with its owner
and search."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import ColumnElement, Select, select, tuple_

from gateway.owners.auth.identity import USER_URN, Caller, Scope, visible
from gateway.owners.auth.signing import is_signed, sign
from gateway.storage.database import Database, from_row
from gateway.storage.tables import runs, sampling_sessions, sessions
from tandem.errors import InvalidRequest, UnknownSession

EndReason = Literal["success", "errored", "interrupted"]

_AGE = (sessions.c.created_at, sessions.c.id)


@dataclass(frozen=True)
class SessionRecord:
    """A row of `sessions`. Times are in seconds since 1970."""

    id: str
    state: str
    reason: str
    detail: str
    display_name: str | None
    user_metadata: Mapping[str, str] | None
    project_id: str
    owner: str
    created_at: float


class _Strict(BaseModel):
    """Refuses unknown fields: a search that ignored a filter would find too much."""

    model_config = ConfigDict(extra="forbid")


class OwnerFilter(_Strict):
    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = Field(default_factory=list, max_length=10)


class StatusFilter(_Strict):
    """`reasons` filters sessions that their client finished; null matches all."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Annotated[list[EndReason] | None, Field(min_length=1)] = None


class SessionFilters(_Strict):
    """A search. An absent filter matches everything. A session matches an id or a name if both are
    given."""

    session_id: str | None = None
    project_ids: Annotated[list[str] | None, Field(max_length=1000)] = None
    user_metadata: dict[str, str] = Field(default_factory=dict, max_length=100)
    display_name: Annotated[str | None, Field(min_length=1)] = None
    owner: OwnerFilter = OwnerFilter()
    statuses: Annotated[list[StatusFilter] | None, Field(min_length=1, max_length=10)] = None


class Cursor(_Strict):
    """The SDK's format: the last session of the previous page, its id with a signature appended."""

    last_created_at: dt.datetime
    last_session_id: str


class SessionQueries:
    """`key` signs the cursors."""

    def __init__(self, *, database: Database, key: bytes) -> None:
        self._database = database
        self._key = key

    async def session(
        self, session_id: str, caller: Caller, *, scope: Scope = "accessible"
    ) -> SessionRecord:
        """Return a session. Raises `UnknownSession`."""
        row = await self._database.read_one(
            select(sessions).where(
                sessions.c.id == session_id, visible(sessions.c.owner, caller, scope)
            )
        )
        if row is None:
            raise UnknownSession(
                f"there is no session {session_id!r} on this server, or it is another owner's; "
                "make a new ServiceClient"
            )
        return from_row(SessionRecord, row)

    async def contents(self, session_id: str) -> tuple[list[str], list[str]]:
        await self._database.flush()
        run_ids, sampler_ids = [
            await self._ids(
                select(table.c.id)
                .where(table.c.session_id == session_id)
                .order_by(table.c.created_at, table.c.id)
            )
            for table in (runs, sampling_sessions)
        ]
        return run_ids, sampler_ids

    async def session_ids(
        self, caller: Caller, *, scope: Scope, limit: int, offset: int
    ) -> list[str]:
        return await self._ids(
            select(sessions.c.id)
            .where(visible(sessions.c.owner, caller, scope))
            .order_by(*(column.desc() for column in _AGE))
            .limit(limit)
            .offset(offset)
        )

    async def search(
        self, filters: SessionFilters, caller: Caller, *, limit: int, cursor: Cursor | None
    ) -> tuple[list[SessionRecord], Cursor | None]:
        """Return a page of sessions, newest first, and the next cursor. Raise `InvalidRequest` for
        a cursor of another search."""
        query = select(sessions).where(*_wanted(filters, caller))
        if cursor is not None:
            query = query.where(tuple_(*_AGE) < await self._position(filters, caller, cursor))
        found: list[SessionRecord] = []
        async for rows in self._database.read_in_batches(query, *_AGE, descending=True):
            records = (from_row(SessionRecord, row) for row in rows)
            found += [record for record in records if _matches(record, filters)]
            if len(found) > limit:
                break
        page = found[:limit]
        if len(found) <= limit:
            return page, None
        last = page[-1]
        when = dt.datetime.fromtimestamp(last.created_at, tz=dt.UTC)
        signature = sign(self._key, *_signed(filters, caller, when, last.id))
        return page, Cursor(last_created_at=when, last_session_id=f"{last.id}.{signature}")

    async def _position(
        self, filters: SessionFilters, caller: Caller, cursor: Cursor
    ) -> tuple[float, str]:
        session_id, _, signature = cursor.last_session_id.rpartition(".")
        try:
            when = cursor.last_created_at.astimezone(dt.UTC)
        except OverflowError:  # no year in UTC
            when = None
        if when is None or not is_signed(
            self._key, signature, *_signed(filters, caller, when, session_id)
        ):
            raise InvalidRequest(
                "the cursor was not issued for this search; pass `next_cursor` back unchanged and "
                "with the same filters, or start without a cursor"
            )
        # The cursor has only microseconds, so prefer the exact time in the session's row.
        row = await self._database.read_one(
            select(sessions.c.created_at).where(sessions.c.id == session_id)
        )
        return row["created_at"] if row is not None else when.timestamp(), session_id

    async def _ids(self, query: Select[tuple[str]]) -> list[str]:
        return [row["id"] for row in await self._database.read(query)]


def _wanted(filters: SessionFilters, caller: Caller) -> list[ColumnElement[bool]]:
    scope: Scope = "owned" if filters.owner.type == "own" else "accessible"
    wanted = [visible(sessions.c.owner, caller, scope)]
    if filters.owner.type == "user":
        owners = [urn.removeprefix(USER_URN) for urn in filters.owner.owner_urns]
        wanted.append(sessions.c.owner.in_(owners))
    if filters.project_ids is not None:
        wanted.append(sessions.c.project_id.in_(filters.project_ids))
    if filters.session_id is not None and filters.display_name is None:
        wanted.append(sessions.c.id == filters.session_id)
    return wanted


def _signed(
    filters: SessionFilters, caller: Caller, when: dt.datetime, session_id: str
) -> Sequence[object]:
    search = filters.model_dump(include=set(SessionFilters.model_fields))
    return ("session_search", caller.owner, search, when, session_id)


def _matches(session: SessionRecord, filters: SessionFilters) -> bool:
    if filters.display_name is not None:
        name = (session.display_name or "").casefold()
        named = all(word in name for word in filters.display_name.casefold().split())
        if not named and session.id != filters.session_id:
            return False
    if not filters.user_metadata.items() <= (session.user_metadata or {}).items():
        return False
    return filters.statuses is None or any(_has(session, s) for s in filters.statuses)


def _has(session: SessionRecord, status: StatusFilter) -> bool:
    """Match a session's state. No session is "failed" or "cancelled", because runs and requests
    fail alone."""
    if status.type == "client_finished":
        return session.state == "finished" and (
            status.reasons is None or session.reason in status.reasons
        )
    return status.type == session.state == "active"
