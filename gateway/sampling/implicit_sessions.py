"""Sessions for requests that name none."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Hashable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.owners.sessions.registry import NewSession, SessionRegistry


@dataclass(frozen=True)
class _ImplicitSession:
    id: str
    numbers: dict[Hashable, int] = field(default_factory=dict)


@dataclass(eq=False, kw_only=True)
class ImplicitSessions:
    """Sessions for requests that name none: one per owner, created on demand.

    Samples that name a model and OpenAI's clients use them. Requests keep them alive instead of
    heartbeats. They expire like other sessions, or after `ttl` seconds."""

    sessions: SessionRegistry
    display_name: str
    user_metadata: Mapping[str, str] | None = None
    ttl: float | None = None

    def __post_init__(self) -> None:
        self._by_owner: dict[str, _ImplicitSession] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def place(self, owner: str, key: Hashable) -> AsyncIterator[tuple[str, int]]:
        """Yield the owner's session id and the number for the sampling session of `key`. The block
        creates it, and success assigns the number. Raises `LimitExceeded`."""
        async with self._locks[owner]:
            implicit = self._by_owner.get(owner)
            if implicit is None or self.sessions.touch(implicit.id) is None:
                session = await self.sessions.create(
                    NewSession(
                        owner=owner,
                        display_name=self.display_name,
                        user_metadata=self.user_metadata,
                    ),
                    ttl=self.ttl,
                )
                implicit = self._by_owner[owner] = _ImplicitSession(session.id)
            number = implicit.numbers.get(key, len(implicit.numbers))
            yield implicit.id, number
            implicit.numbers[key] = number
