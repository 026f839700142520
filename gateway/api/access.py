"""Who may do what, and on whose things: the one place that decides it.

`NEEDS` says for each route which role it takes; `guarded` puts that before the routes. `Access`
hands a route the thing that its caller named, or raises what it would raise for a thing that
does not exist: an id says nothing about whether another owner has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.auth.identity import Caller, Identity, Readers
from gateway.checkpoints.catalog import Checkpoint, CheckpointCatalog, unknown_checkpoint
from gateway.identifiers import CheckpointPath, parse_checkpoint_path
from gateway.metrics import Metrics
from gateway.runs.queries import Queries
from gateway.sampling.sessions import SamplingSession, SamplingSessionRegistry
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

Need = Literal["nothing", "signature", "look", "change", "admin"]

NEEDS: Mapping[str, Need] = {
    # Without a key. Addresses that the gateway signed carry their own proof.
    "healthz": "nothing",
    "metrics": "nothing",  # from this machine; from elsewhere it takes any key (edge.py)
    "openapi": "nothing",  # as metrics
    "download": "signature",
    "trace_file": "signature",
    # With any key: to look, at the caller's own things and at what is published.
    "client_config": "look",
    "dynamic_config": "look",
    "capabilities": "look",
    "openai_models": "look",
    "openai_model": "look",
    "telemetry": "look",
    "get_version": "look",
    "status": "look",
    "list_models": "look",
    "exchange_token": "look",
    "own_key": "look",
    "delete_own_key": "look",  # whoever holds a key may give it up
    "retrieve_future": "look",
    "get_info": "look",
    "get_sampler": "look",
    "list_sessions": "look",
    "get_session": "look",
    "search_sessions": "look",
    "trace_export": "look",
    "training_runs": "look",
    "training_run": "look",
    "run_checkpoints": "look",
    "user_checkpoints": "look",
    "weights_info": "look",
    "external_weights_urls": "look",
    "checkpoint_files": "look",
    "usage_events": "look",
    "checkpoint_storage": "look",
    # To change or compute something.
    "create_session": "change",
    "session_heartbeat": "change",
    "finish_session": "change",
    "assign_session_project": "change",
    "create_model": "change",
    "forward_backward": "change",
    "forward_of_old_sdk": "change",
    "optim_step": "change",
    "save_weights": "change",
    "save_weights_for_sampler": "change",
    "save_weights_external": "change",
    "load_weights": "change",
    "create_custom_loss": "change",
    "create_sampling_session": "change",
    "join_sampling_session": "change",
    "asample": "change",
    "openai_completions": "change",
    "openai_chat_completions": "change",
    "retrieve_futures": "change",  # it also says which samples are not needed any more
    "cancel_future": "change",
    "copy_weights": "change",
    "delete_checkpoint": "change",
    "publish_checkpoint": "change",
    "unpublish_checkpoint": "change",
    "set_checkpoint_ttl": "change",
    # What concerns all owners.
    "add_model": "admin",
    "remove_model": "admin",
    "config": "admin",
    "audit_log": "admin",
    "list_keys": "admin",
    "create_key": "admin",
    "revoke_key": "admin",
}
"""By the name of the route's function. A route without a row is not served at all."""

_NEEDED = {"change": "member", "admin": "admin"}


def guarded(routes: Iterable[Route]) -> list[Route]:
    """The routes, each behind a guard that knows what it needs."""
    found = list(routes)
    for route in found:
        name = route.endpoint.__name__
        assert name in NEEDS, f"gateway/access.py has no row for the route {name} ({route.path})"
        route.app = _Guard(route.app, need=NEEDS[name])
    return found


class _Guard:
    """Raises `PermissionDenied` for a caller whose role does not suffice."""

    def __init__(self, app: ASGIApp, *, need: Need) -> None:
        self._app = app
        self._need = need

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._need != "nothing" and self._need != "signature":
            check_role(scope["state"]["caller"], self._need)
        await self._app(scope, receive, send)


def check_role(caller: Caller, need: Literal["look", "change", "admin"]) -> None:
    """Raises `PermissionDenied`, which names the role that is needed."""
    suffices = {"look": True, "change": caller.may_change, "admin": caller.role == "admin"}
    if not suffices[need]:
        raise PermissionDenied(
            f"this needs a key with the role {_NEEDED[need]}; {caller.key_id} is a key with the "
            f"role {caller.role} (an admin makes keys with `tandem keys create`)"
        )


class Access:
    """What callers name, if it is theirs (an admin's is everything)."""

    def __init__(
        self,
        *,
        identity: Identity,
        metrics: Metrics,
        sessions: SessionRegistry,
        sampling: SamplingSessionRegistry,
        directory: Queries,
        checkpoints: CheckpointCatalog,
    ) -> None:
        self._identity = identity
        self._metrics = metrics
        self._sessions = sessions
        self._sampling = sampling
        self._directory = directory
        self._checkpoints = checkpoints

    async def session(self, session_id: str, caller: Caller) -> Session:
        """The active session; that it is asked for is a sign of life. Raises `SessionFinished`
        or `UnknownSession`."""
        session = self._sessions.get(session_id)
        if session is not None and caller.may_see(session.owner):
            if caller.may_change:
                self._sessions.touch(session_id)
            return session
        ended = await self._directory.session(session_id, caller)
        raise SessionFinished(why_ended(session_id, reason=ended.reason, detail=ended.detail))

    async def run(self, run_id: str, caller: Caller) -> Session:
        """The active session of a training run, which may not exist in it. Raises
        `SessionFinished` or `UnknownRun`."""
        try:
            return await self.session(run_id.partition(":train:")[0], caller)
        except UnknownSession as error:
            raise UnknownRun(f"there is no training run {run_id!r} on this server") from error

    async def sampling_session(self, sampler_id: str, caller: Caller) -> SamplingSession:
        """One that can be sampled from. Raises `UnknownSampler`, or `SessionFinished` where its
        session is about to end."""
        if not await self._owns_session(sampler_id.partition(":sample:")[0], caller):
            raise _unknown_sampler(sampler_id)
        found = await self._sampling.require(sampler_id)
        await self.session(found.session_id, caller)
        return found

    async def past_sampling_session(self, sampler_id: str, caller: Caller) -> None:
        """One that there is or was. Raises `UnknownSampler`."""
        if not await self._owns_session(sampler_id.partition(":sample:")[0], caller) or (
            not await self._sampling.known(sampler_id)
        ):
            raise _unknown_sampler(sampler_id)

    async def request(self, request_id: str, caller: Caller) -> None:
        """That a request, should there be one, is of the caller's session: a sign of life.
        Raises `UnknownRequest`."""
        session_id = request_id.partition(":")[0]
        if not await self._owns_session(session_id, caller):
            raise UnknownRequest(f"there is no request {request_id!r} on this server")
        if caller.may_change:
            self._sessions.touch(session_id)

    def readers(self, caller: Caller, *, token: str | None = None) -> Readers:
        """`token`: a key or token of the owner who lends a checkpoint. Raises
        `PermissionDenied` where it is not good."""
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
        """One to read: the caller's own, a published one, or one that `token` lends. Raises
        `UnknownWeights`, `PermissionDenied` for the token, or `InvalidRequest` for what is no
        checkpoint path."""
        return await self._checkpoints.get(str(path), readers=self.readers(caller, token=token))

    async def own_checkpoint(self, path: str | CheckpointPath, caller: Caller) -> Checkpoint:
        """One to change. Raises `UnknownWeights` or `InvalidRequest`."""
        found = await self._checkpoints.find(parse_checkpoint_path(str(path)))
        if found is None or not caller.may_see(found.owner):
            raise unknown_checkpoint(str(path))
        return found

    async def _owns_session(self, session_id: str, caller: Caller) -> bool:
        session = self._sessions.get(session_id)
        if session is not None and caller.may_see(session.owner):
            return True
        try:
            await self._directory.session(session_id, caller)
        except UnknownSession:
            return False
        return True


def _unknown_sampler(sampler_id: str) -> UnknownSampler:
    return UnknownSampler(f"there is no sampling session {sampler_id!r}")
