"""Sessions of requests that name none: one per owner, created when it is first needed.

Samples that name a model instead of a sampling session use one, and so do OpenAI's clients. Such
a session has no client that sends heartbeats: requests keep it alive, and without any it expires
like other sessions.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Hashable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from gateway.auth.identity import Readers
from gateway.checkpoints.versions import WeightVersion
from gateway.sampling.sessions import SamplingSession, SamplingSessionRegistry
from gateway.sessions.registry import NewSession, SessionRegistry
from tandem.errors import InvalidRequest


@dataclass(frozen=True)
class _ImplicitSession:
    """An owner's session, the numbers of its sampling sessions, and their next `seq_id`s."""

    id: str
    numbers: dict[Hashable, int] = field(default_factory=dict)
    seq_ids: defaultdict[str, count[int]] = field(default_factory=lambda: defaultdict(count))


class ImplicitSessions:
    """`display_name`, `user_metadata` and `ttl` (seconds without a request after which the
    session ends; None: as any session) are those of the sessions that are created."""

    def __init__(
        self,
        *,
        sessions: SessionRegistry,
        sampling: SamplingSessionRegistry,
        display_name: str,
        user_metadata: Mapping[str, str] | None = None,
        ttl: float | None = None,
    ) -> None:
        self._sessions = sessions
        self._sampling = sampling
        self._display_name = display_name
        self._user_metadata = user_metadata
        self._ttl = ttl
        self._by_owner: dict[str, _ImplicitSession] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def create(
        self, *, owner: str, base_model: str | None, model_path: str | None, readers: Readers
    ) -> SamplingSession:
        """Return the owner's sampling session of a base model or a checkpoint; the first request
        fixes the weights. Raises as `SamplingSessionRegistry.create`."""
        if (base_model is None) == (model_path is None):
            raise InvalidRequest(
                "a sample needs a sampling_session_id with a seq_id, or else one of base_model "
                "and model_path"
            )
        async with self._numbered(owner, (base_model, model_path)) as (session_id, number):
            return await self._sampling.create(
                session_id=session_id,
                number=number,
                base_model=base_model,
                model_path=model_path,
                readers=readers,
            )

    async def serve(
        self, *, owner: str, model: str, version: WeightVersion, rank: int
    ) -> SamplingSession:
        """Return the owner's sampling session of `model`, which samples from `version` from now
        on. `rank` is that of its adapter, or 0. Raises `LimitExceeded`."""
        async with self._numbered(owner, model) as (session_id, number):
            return await self._sampling.serve(
                session_id=session_id,
                number=number,
                model_path=model if version.run_id else "",
                version=version,
                rank=rank,
            )

    def next_seq_id(self, *, owner: str, sampling_session_id: str) -> int:
        """Return the next sequence number of a sampling session of `create` or `serve`."""
        return next(self._by_owner[owner].seq_ids[sampling_session_id])

    @asynccontextmanager
    async def _numbered(self, owner: str, key: Hashable) -> AsyncIterator[tuple[str, int]]:
        """Yield the id of the owner's session and the number in it of the sampling session of
        `key`, which is assigned if the block succeeds."""
        async with self._locks[owner]:
            implicit = self._by_owner.get(owner)
            if implicit is None or self._sessions.touch(implicit.id) is None:
                session = await self._sessions.create(
                    NewSession(
                        owner=owner,
                        display_name=self._display_name,
                        user_metadata=self._user_metadata,
                        ttl=self._ttl,
                    )
                )
                implicit = self._by_owner[owner] = _ImplicitSession(session.id)
            number = implicit.numbers.get(key, len(implicit.numbers))
            yield implicit.id, number
            implicit.numbers[key] = number
