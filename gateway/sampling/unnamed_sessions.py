"""Samples that name a model instead of a sampling session, the protocol's oldest form.

They get a session of ours, one for each owner, which lives like any other: until nothing is
heard of it for as long as a session lives without a heartbeat. Asking for a result is a sign
of life, too (`routes/futures.py`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import count

from gateway.auth.identity import Readers
from gateway.sampling.sessions import SamplingSession, SamplingSessionRegistry
from gateway.sessions.registry import NewSession, SessionRegistry
from tandem.errors import InvalidRequest

_Named = tuple[str | None, str | None]


class _Open:
    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.numbers: dict[_Named, int] = {}
        self.places: defaultdict[str, count[int]] = defaultdict(count)


class UnnamedSessions:
    def __init__(self, *, sessions: SessionRegistry, sampling: SamplingSessionRegistry) -> None:
        self._sessions = sessions
        self._sampling = sampling
        self._open: dict[str, _Open] = {}
        self._one_at_a_time = asyncio.Lock()

    async def place(
        self, *, owner: str, base_model: str | None, model_path: str | None, readers: Readers
    ) -> tuple[SamplingSession, int]:
        """A sampling session of this model or checkpoint, and the next place in it. Raises what
        the creation of a sampling session raises."""
        if (base_model is None) == (model_path is None):
            raise InvalidRequest(
                "a sample needs a sampling_session_id with a seq_id, or else one of base_model "
                "and model_path"
            )
        async with self._one_at_a_time:
            opened = await self._of(owner)
            named = (base_model, model_path)
            number = opened.numbers.get(named, len(opened.numbers))
            session = await self._sampling.create(
                session_id=opened.session_id,
                number=number,
                base_model=base_model,
                model_path=model_path,
                readers=readers,
            )
            opened.numbers[named] = number  # not before: a name may be of nothing
            return session, next(opened.places[session.id])

    async def _of(self, owner: str) -> _Open:
        opened = self._open.get(owner)
        if opened is None or self._sessions.touch(opened.session_id) is None:
            session = await self._sessions.create(
                NewSession(owner=owner, display_name="Samples without a session")
            )
            opened = self._open[owner] = _Open(session.id)
        return opened
