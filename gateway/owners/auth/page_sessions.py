"""Browsers that are signed in to the page.

A browser's cookie holds a random token, and the table its SHA-256 and the id of the key that signed
in. So a session ends with its key, and a copy of the database signs nobody in."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import delete, insert, select

from gateway.owners.auth.identity import Caller
from gateway.owners.auth.keys import KeyStore, digest_of
from gateway.storage.database import Database, from_row
from gateway.storage.tables import page_sessions
from tandem.errors import InvalidRequest, Unauthenticated
from tandem.protocol.sign_in_code import CODE_SECONDS, code_issued_at

SESSION_SECONDS = 14 * 86_400
MOST_SESSIONS = 32
"""Of one key. A further sign-in ends the oldest."""


@dataclass(frozen=True)
class PageSession:
    """`id` is the token's SHA-256 in hex. `expires_at` is in seconds since 1970."""

    id: str
    key_id: str
    expires_at: float


class PageSessions:
    """`started_at` is the gateway's start: it takes no code that is older."""

    def __init__(
        self,
        *,
        database: Database,
        keys: KeyStore,
        local_key: str,
        started_at: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._keys = keys
        self._local_key = local_key
        self._started_at = started_at
        self._clock = clock
        self._sessions: dict[str, PageSession] = {}
        self._used_codes: dict[str, float] = {}

    async def read_page_sessions(self) -> None:
        rows = await self._database.read(select(page_sessions))
        self._sessions = {row["id"]: from_row(PageSession, row) for row in rows}

    async def sign_in(self, caller: Caller) -> str:
        """Return a new session's token. The session ends with the caller's own token, if any."""
        now = self._clock()
        mine = [each for each in self._sessions.values() if each.key_id == caller.key_id]
        gone = [each for each in self._sessions.values() if each.expires_at <= now]
        mine.sort(key=lambda each: each.expires_at)
        ended = {each.id for each in (*gone, *mine[: max(0, len(mine) + 1 - MOST_SESSIONS)])}
        token = secrets.token_urlsafe(32)
        ends = min(now + SESSION_SECONDS, caller.expires_at or float("inf"))
        session = PageSession(id=_id_of(token), key_id=caller.key_id, expires_at=ends)
        await self._database.write_together(
            delete(page_sessions).where(page_sessions.c.id.in_(ended)),
            insert(page_sessions).values(vars(session)),
        )
        for each in ended:
            self._sessions.pop(each, None)
        self._sessions[session.id] = session
        return token

    def caller_of(self, token: str) -> Caller:
        """Return who signed in. Raises `Unauthenticated` after a sign-out, or without the key."""
        session = self._sessions.get(_id_of(token))
        key = self._keys.get(session.key_id) if session is not None else None
        if session is None or key is None or session.expires_at <= self._clock():
            raise Unauthenticated("you are signed out; sign in again")
        if ended := self._keys.ended(key):
            raise Unauthenticated(f"you are signed out, because the API key {key.id} has {ended}")
        self._keys.note_use(key)
        return Caller(owner=key.owner, key_id=key.id, role=key.role)

    async def sign_out(self, token: str) -> None:
        """End the session for good. Idempotent."""
        ended = self._sessions.pop(_id_of(token), None)
        if ended is not None:
            await self._database.write(
                delete(page_sessions).where(page_sessions.c.id == ended.id), durable=True
            )

    def use_code(self, code: str) -> bytes:
        """Return the local key for a code of `tandem up`. Raises `InvalidRequest` for a used, old
        or foreign code."""
        now = self._clock()
        issued = code_issued_at(code, self._local_key)
        ends = (issued or 0) + CODE_SECONDS
        if issued is None or issued < int(self._started_at) or ends <= now:
            raise InvalidRequest("the link has expired; sign in with the key of `tandem up`")
        if code in self._used_codes:
            raise InvalidRequest("the link was used before; sign in with the key of `tandem up`")
        unended = {each: end for each, end in self._used_codes.items() if end > now}
        self._used_codes = {**unended, code: ends}
        return self._local_key.encode()


def _id_of(token: str) -> str:
    return digest_of(token.encode()).hex()
