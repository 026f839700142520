"""Sessions of requests that have none: one for each owner, made when it is first needed.

An engine belongs to a session. The one that OpenAI's clients use is an owner's implicit one: it
is alive while it is used, without heartbeats, and ends after `idle_ttl` seconds without a
request, and its engines with it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import count

from gateway.api.openai.models import Served
from gateway.sampling.router import SamplerRouter
from gateway.sampling.sampler import Sampler
from gateway.sampling.sessions import SamplingSession, SamplingSessionRegistry
from gateway.sessions.registry import NewSession, SessionRegistry


class _Open:
    """An owner's implicit session: the numbers of its models, and the next places in them."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.numbers: dict[str, int] = {}
        self.places: defaultdict[str, count[int]] = defaultdict(count)


class ImplicitSessions:
    """`idle_ttl` in seconds; `rank`: of the adapters that every engine is made for, so that a
    base model and its adapters can share one (0: as each needs it)."""

    def __init__(
        self,
        *,
        sessions: SessionRegistry,
        sampling: SamplingSessionRegistry,
        samplers: SamplerRouter,
        idle_ttl: float,
        rank: int,
    ) -> None:
        self._sessions = sessions
        self._sampling = sampling
        self._samplers = samplers
        self._idle_ttl = idle_ttl
        self._rank = rank
        self._open: dict[str, _Open] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def enter(self, *, owner: str, served: Served) -> tuple[SamplingSession, Sampler]:
        """The owner's sampling session of this model, which samples from the version that is
        served now, and the engine for it, which may have to start. Raises `LimitExceeded`."""
        async with self._locks[owner]:
            opened = await self._of(owner)
            number = opened.numbers.setdefault(served.name, len(opened.numbers))
            session = await self._sampling.serve(
                session_id=opened.session_id,
                number=number,
                model_path=served.name if served.version.run_id else "",
                version=served.version,
                rank=served.rank,
            )
            sampler = self._samplers.ensure(
                session_id=opened.session_id,
                model=served.model,
                rank=max(served.rank, self._rank),
            )
            return session, sampler

    def place(self, *, owner: str, sampling_session_id: str) -> int:
        """The next place of a sampling session that was entered."""
        return next(self._open[owner].places[sampling_session_id])

    def touch(self, session_id: str) -> None:
        """Somebody waits for something of this session."""
        self._sessions.touch(session_id)

    async def _of(self, owner: str) -> _Open:
        opened = self._open.get(owner)
        if opened is None or self._sessions.touch(opened.session_id) is None:
            session = await self._sessions.create(
                NewSession(
                    owner=owner,
                    display_name="OpenAI-compatible requests",
                    user_metadata={"tandem_made_for": "/v1"},
                    ttl=self._idle_ttl,
                )
            )
            opened = self._open[owner] = _Open(session.id)
        return opened
