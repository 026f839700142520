"""What callers name, resolved if it is theirs.

`Access` hands a route the thing that its caller named, or raises what it would raise for a thing
that does not exist: an id says nothing about whether another owner has it. Roles are checked
before, where the route is (`api/routing.py`).
"""

from __future__ import annotations

from gateway.auth.identity import Caller, Identity, Readers
from gateway.checkpoints.catalog import Checkpoint, CheckpointCatalog, unknown_checkpoint
from gateway.identifiers import CheckpointPath, parse_checkpoint_path
from gateway.metrics import Metrics
from gateway.sampling.sessions import SamplingSession, SamplingSessionRegistry
from gateway.sessions.queries import SessionQueries
from gateway.sessions.registry import Session, SessionRegistry, why_ended
from tandem.errors import (
    PermissionDenied,
    SessionFinished,
    Unauthenticated,
    UnknownRequest,
    UnknownRun,
    UnknownSampler,
    UnknownSession,
)


class Access:
    """Resolves ids for a caller; everything is an admin's."""

    def __init__(
        self,
        *,
        identity: Identity,
        metrics: Metrics,
        sessions: SessionRegistry,
        sampling: SamplingSessionRegistry,
        session_queries: SessionQueries,
        checkpoints: CheckpointCatalog,
    ) -> None:
        self._identity = identity
        self._metrics = metrics
        self._sessions = sessions
        self._sampling = sampling
        self._session_queries = session_queries
        self._checkpoints = checkpoints

    async def session(self, session_id: str, caller: Caller) -> Session:
        """Return the active session, and keep it alive. Raises `SessionFinished` or
        `UnknownSession`."""
        session = self._sessions.get(session_id)
        if session is not None and caller.may_see(session.owner):
            if caller.may_change:
                self._sessions.touch(session_id)
            return session
        ended = await self._session_queries.session(session_id, caller)
        raise SessionFinished(why_ended(session_id, reason=ended.reason, detail=ended.detail))

    async def run(self, run_id: str, caller: Caller) -> Session:
        """Return the active session of a training run; the run itself may not exist. Raises
        `SessionFinished` or `UnknownRun`."""
        try:
            return await self.session(run_id.partition(":train:")[0], caller)
        except UnknownSession as error:
            raise UnknownRun(f"there is no training run {run_id!r} on this server") from error

    async def sampling_session(self, sampler_id: str, caller: Caller) -> SamplingSession:
        """Return one that can be sampled from. Raises `UnknownSampler`, or `SessionFinished`
        where its session is about to end."""
        if not await self._owns_session(sampler_id.partition(":sample:")[0], caller):
            raise _unknown_sampler(sampler_id)
        found = await self._sampling.require(sampler_id)
        await self.session(found.session_id, caller)
        return found

    async def past_sampling_session(self, sampler_id: str, caller: Caller) -> None:
        """Check that a sampling session exists or existed. Raises `UnknownSampler`."""
        if not await self._owns_session(sampler_id.partition(":sample:")[0], caller) or (
            not await self._sampling.known(sampler_id)
        ):
            raise _unknown_sampler(sampler_id)

    async def request(self, request_id: str, caller: Caller) -> None:
        """Check that a request id is of the caller's session, and keep that alive. Raises
        `UnknownRequest`."""
        session_id = request_id.partition(":")[0]
        if not await self._owns_session(session_id, caller):
            raise UnknownRequest(f"there is no request {request_id!r} on this server")
        if caller.may_change:
            self._sessions.touch(session_id)

    def readers(self, caller: Caller, *, token: str | None = None) -> Readers:
        """Return on whose behalf a checkpoint is read. `token`: a key or token of the owner who
        lends it. Raises `PermissionDenied` where it is not valid."""
        if not token:
            return Readers((caller,))
        try:
            return Readers((caller, self._identity.identify(token.encode())))
        except Unauthenticated as error:
            self._metrics.refused_keys.labels(reason="weights_access_token").inc()
            raise PermissionDenied(f"the access token for the weights: {error.message}") from error

    async def checkpoint(
        self, path: str | CheckpointPath, caller: Caller, *, token: str | None = None
    ) -> Checkpoint:
        """Return one to read: the caller's own, a published one, or one that `token` lends.
        Raises `UnknownWeights`, `PermissionDenied` for the token, or `InvalidRequest` for what
        is no checkpoint path."""
        return await self._checkpoints.get(str(path), readers=self.readers(caller, token=token))

    async def own_checkpoint(self, path: str | CheckpointPath, caller: Caller) -> Checkpoint:
        """Return one to change. Raises `UnknownWeights` or `InvalidRequest`."""
        found = await self._checkpoints.find(parse_checkpoint_path(str(path)))
        if found is None or not caller.may_see(found.owner):
            raise unknown_checkpoint(str(path))
        return found

    async def _owns_session(self, session_id: str, caller: Caller) -> bool:
        session = self._sessions.get(session_id)
        if session is not None and caller.may_see(session.owner):
            return True
        try:
            await self._session_queries.session(session_id, caller)
        except UnknownSession:
            return False
        return True


def _unknown_sampler(sampler_id: str) -> UnknownSampler:
    return UnknownSampler(f"there is no sampling session {sampler_id!r}")
