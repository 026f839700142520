"""Searching sessions, newest first, in pages.

The database selects by owner, project and position; names, metadata and states are compared
here, chunk by chunk, because databases differ in case folding and in their treatment of JSON.

A cursor says where the next page begins. It is signed together with its owner and search, so that
a cursor of another search is refused.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select, tuple_

from gateway.auth.identity import USER_URN, Caller, Scope, visible
from gateway.auth.signing import is_signed, sign
from gateway.sessions.queries import SessionRecord, session_of
from gateway.storage.database import Database
from gateway.storage.tables import sessions
from tandem.errors import InvalidRequest

EndReason = Literal["success", "errored", "interrupted"]

_CHUNK = 500
_PURPOSE = "session_search"


class _Strict(BaseModel):
    """An unknown field is refused: a search without that filter would find too much."""

    model_config = ConfigDict(extra="forbid")


class OwnerFilter(_Strict):
    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = Field(default_factory=list, max_length=10)


class StatusFilter(_Strict):
    """`reasons` selects among the sessions that their client finished; null selects all."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Annotated[list[EndReason] | None, Field(min_length=1)] = None


class SessionFilters(_Strict):
    """What to search for; an absent filter matches everything. If both an id and a name are
    given, a session matches either."""

    session_id: str | None = None
    project_ids: Annotated[list[str] | None, Field(max_length=1000)] = None
    user_metadata: dict[str, str] = Field(default_factory=dict, max_length=100)
    display_name: Annotated[str | None, Field(min_length=1)] = None
    owner: OwnerFilter = OwnerFilter()
    statuses: Annotated[list[StatusFilter] | None, Field(min_length=1, max_length=10)] = None


@dataclass(frozen=True)
class Cursor:
    """In the SDK's format: the last session of the page before, its id with our signature
    appended."""

    last_created_at: dt.datetime
    last_session_id: str


@dataclass(frozen=True)
class Page:
    sessions: Sequence[SessionRecord]
    next_cursor: Cursor | None


class SessionSearch:
    def __init__(self, *, database: Database, key: bytes) -> None:
        self._database = database
        self._key = key

    async def page(
        self, filters: SessionFilters, caller: Caller, *, limit: int, cursor: Cursor | None
    ) -> Page:
        """Raise `InvalidRequest` for a cursor that was not issued for this search."""
        after = await self._read_cursor(filters, caller, cursor) if cursor else None
        found: list[SessionRecord] = []
        async for session in self._candidates(filters, caller, after):
            if _matches(session, filters):
                found.append(session)
            if len(found) > limit:
                break
        page = found[:limit]
        following = self._cursor(filters, caller, page[-1]) if len(found) > limit else None
        return Page(sessions=page, next_cursor=following)

    async def _candidates(
        self, filters: SessionFilters, caller: Caller, after: SessionRecord | None
    ) -> AsyncIterator[SessionRecord]:
        scope: Scope = "owned" if filters.owner.type == "own" else "accessible"
        wanted = [visible(sessions.c.owner, caller, scope)]
        if filters.owner.type == "user":
            owners = [urn.removeprefix(USER_URN) for urn in filters.owner.owner_urns]
            wanted.append(sessions.c.owner.in_(owners))
        if filters.project_ids is not None:
            wanted.append(sessions.c.project_id.in_(filters.project_ids))
        if filters.session_id is not None and filters.display_name is None:
            wanted.append(sessions.c.id == filters.session_id)
        query = (
            select(sessions)
            .where(*wanted)
            .order_by(sessions.c.created_at.desc(), sessions.c.id.desc())
            .limit(_CHUNK)
        )
        while True:
            here = query
            if after is not None:
                position = tuple_(sessions.c.created_at, sessions.c.id)
                here = query.where(position < (after.created_at, after.id))
            rows = await self._database.read(here)
            for row in rows:
                after = session_of(row)
                yield after
            if len(rows) < _CHUNK:
                return

    def _cursor(self, filters: SessionFilters, caller: Caller, last: SessionRecord) -> Cursor:
        when = dt.datetime.fromtimestamp(last.created_at, tz=dt.UTC)
        signature = sign(self._key, *_signed(filters, caller, when, last.id))
        return Cursor(last_created_at=when, last_session_id=f"{last.id}.{signature}")

    async def _read_cursor(
        self, filters: SessionFilters, caller: Caller, cursor: Cursor
    ) -> SessionRecord:
        session_id, _, signature = cursor.last_session_id.rpartition(".")
        try:
            when = cursor.last_created_at.astimezone(dt.UTC)
        except OverflowError:  # a time that UTC has no year for
            when = None
        if when is None or not is_signed(
            self._key, signature, *_signed(filters, caller, when, session_id)
        ):
            raise InvalidRequest(
                "the cursor was not issued for this search; pass `next_cursor` back unchanged and "
                "with the same filters, or start without a cursor"
            )
        row = await self._database.read_one(select(sessions).where(sessions.c.id == session_id))
        assert row is not None, "rows of sessions are never removed"
        return session_of(row)


def _signed(
    filters: SessionFilters, caller: Caller, when: dt.datetime, session_id: str
) -> tuple[str, ...]:
    content = filters.model_dump(include=set(SessionFilters.model_fields))
    search = orjson.dumps(content, option=orjson.OPT_SORT_KEYS).decode()
    return (_PURPOSE, caller.owner, search, when.isoformat(timespec="microseconds"), session_id)


def _matches(session: SessionRecord, filters: SessionFilters) -> bool:
    if filters.display_name is not None:
        name = (session.display_name or "").casefold()
        named = all(word in name for word in filters.display_name.casefold().split())
        if not named and session.id != filters.session_id:
            return False
    metadata = session.user_metadata or {}
    if any(metadata.get(key) != value for key, value in filters.user_metadata.items()):
        return False
    return filters.statuses is None or any(_has(session, s) for s in filters.statuses)


def _has(session: SessionRecord, status: StatusFilter) -> bool:
    """No session is "failed" or "cancelled" here: a run or a request fails alone. A session is
    finished by its client or expires, for which the SDK has no status."""
    if status.type == "client_finished":
        return session.state == "finished" and (
            status.reasons is None or session.reason in status.reasons
        )
    return status.type == session.state == "active"
