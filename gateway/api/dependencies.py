"""Dependencies of path operations: access to the gateway, and the caller's things in the path.

An id of another owner raises the same error as a missing one. Roles are checked earlier
(`routing.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends
from starlette.requests import Request

from gateway.api.fields import PathText
from gateway.api.routing import Refuses
from gateway.checkpoints.catalog import Checkpoint, unknown_checkpoint
from gateway.core import Gateway
from gateway.identifiers import (
    CheckpointPath,
    make_checkpoint_path,
    unknown_request,
    unknown_run,
    unknown_sampler,
)
from gateway.owners.auth.identity import Caller, Readers
from gateway.owners.sessions.queries import SessionRecord
from gateway.owners.sessions.registry import Session, why_ended
from gateway.sampling.sessions import SamplingSession
from tandem.errors import (
    PermissionDenied,
    SessionFinished,
    Unauthenticated,
    UnknownSession,
    UnknownWeights,
)

BLUEPRINT = "tandem.blueprint"
"""The key of a session's `user_metadata` with the name of its blueprint."""


@dataclass
class AuditNote:
    """The audit log's name for the changed thing, if the path does not name it, without content."""

    target: str = ""
    detail: dict[str, str] = field(default_factory=dict)

    def note(self, target: str, **detail: str) -> None:
        self.target = target
        self.detail = detail


class Access:
    """A request's gateway, caller and audit note, and the caller's things by their ids. An admin
    may access everything."""

    def __init__(self, request: Request) -> None:
        self.gateway = cast(Gateway, request.app.state.gateway)
        self._request = request

    @property
    def caller(self) -> Caller:
        """The owner of the key. A route that needs no key has none."""
        return cast(Caller, self._request.state.caller)

    @property
    def audit(self) -> AuditNote:
        state = self._request.state
        if not hasattr(state, "audit_note"):
            state.audit_note = AuditNote()
        return cast(AuditNote, state.audit_note)

    @property
    def base_url(self) -> str:
        """The server's address for the client, without a slash at the end."""
        return (self.gateway.settings.public_url or str(self._request.base_url)).rstrip("/")

    async def raw_body(self) -> bytes:
        return await self._request.body()

    async def session(self, session_id: str) -> Session:
        """Return the active session and keep it alive. Raises `SessionFinished` or
        `UnknownSession`."""
        session = self._active(session_id)
        if session is not None:
            self.check_blueprint(session)
            self._keep_alive(session_id)
            return session
        ended = await self.gateway.session_queries.session(session_id, self.caller)
        raise SessionFinished(why_ended(session_id, reason=ended.reason, detail=ended.detail))

    async def session_for_run(self, session_id: str, metadata: Mapping[str, object] | None) -> None:
        """Check that a run with this `user_metadata` may begin in an active session. Raises as
        `session`, and `PermissionDenied`."""
        await self.session(session_id)
        if self.caller.reach == "blueprints" and "tandem.deadline" in (metadata or {}):
            raise PermissionDenied("a run of the role ci has the tandem.deadline of its session")

    def check_blueprint(self, session: Session | SessionRecord | None) -> None:
        """Raise `PermissionDenied` for the role `ci` outside the sessions of blueprints."""
        metadata = session.user_metadata if session is not None else None
        if self.caller.reach == "blueprints" and not (metadata or {}).get(BLUEPRINT):
            raise PermissionDenied(
                "a key of the role ci works in sessions of blueprints only; `tandem blueprint run` "
                f"makes one, with {BLUEPRINT} in its user_metadata"
            )

    async def check_run(self, run_id: str) -> None:
        """Raise `PermissionDenied` for the role `ci` if the run is no blueprint's."""
        if self.caller.reach == "blueprints" and not await self._owns(run_id.partition(":")[0]):
            self.check_blueprint(None)

    async def run(self, run_id: str) -> Session:
        """Return a training run's active session. The run itself may not exist. Raises
        `SessionFinished` or `UnknownRun`."""
        try:
            return await self.session(run_id.partition(":train:")[0])
        except UnknownSession as error:
            raise unknown_run(run_id) from error

    async def sampling_session(self, sampler_id: str) -> SamplingSession:
        """Return an active sampling session. Raises `UnknownSampler`, or `SessionFinished` if its
        session is ending."""
        if not await self._owns(sampler_id.partition(":sample:")[0]):
            raise unknown_sampler(sampler_id)
        self._keep_alive(sampler_id.partition(":sample:")[0])  # also while the request waits
        found = await self.gateway.sampling.require(sampler_id)
        await self.session(found.session_id)
        return found

    async def past_sampling_session(self, sampler_id: str) -> None:
        """Check that a sampling session exists or existed. Raises `UnknownSampler`."""
        owned = await self._owns(sampler_id.partition(":sample:")[0])
        if not owned or not await self.gateway.sampling.known(sampler_id):
            raise unknown_sampler(sampler_id)

    async def request(self, request_id: str) -> None:
        """Check that a request id belongs to the caller's session, and keep that alive. Raises
        `UnknownRequest`."""
        session_id = request_id.partition(":")[0]
        if not await self._owns(session_id):
            raise unknown_request(request_id)
        self._keep_alive(session_id)

    def readers(self, *, token: str | None = None) -> Readers:
        """Return the readers of a checkpoint. `token` is a key or token that its owner lends.
        Raises `PermissionDenied` if it is invalid."""
        if not token:
            return Readers((self.caller,))
        try:
            return Readers((self.caller, self.gateway.identity.identify(token.encode())))
        except Unauthenticated as error:
            self.gateway.metrics.refused_keys.labels(reason="weights_access_token").inc()
            raise PermissionDenied(f"the access token for the weights: {error.message}") from error

    async def checkpoint(self, path: str | CheckpointPath) -> Checkpoint:
        """Return the caller's own or a published checkpoint. Raises `UnknownWeights`, or
        `InvalidRequest` for a malformed path."""
        return await self.gateway.checkpoints.get(str(path), readers=self.readers())

    def _active(self, session_id: str) -> Session | None:
        session = self.gateway.sessions.get(session_id)
        return session if session is not None and self.caller.may_see(session.owner) else None

    def _keep_alive(self, session_id: str) -> None:
        oversees = self.caller.role == "maintainer" and self.caller.sees_all
        if self.caller.may_change and not oversees:
            self.gateway.sessions.touch(session_id)

    async def _owns(self, session_id: str) -> bool:
        session: Session | SessionRecord | None = self._active(session_id)
        if session is None:
            try:
                session = await self.gateway.session_queries.session(session_id, self.caller)
            except UnknownSession:
                return False
        self.check_blueprint(session)
        return True


async def _access(request: Request) -> Access:
    """Async, because FastAPI would run a plain function in a thread."""
    return Access(request)


AccessDep = Annotated[Access, Depends(_access)]


async def _past_session(session_id: PathText, access: AccessDep) -> SessionRecord:
    return await access.gateway.session_queries.session(session_id, access.caller)


async def _path(run_id: PathText, kind: PathText, name: PathText) -> CheckpointPath:
    return make_checkpoint_path(run_id=run_id, kind=kind, name=name)


_CheckpointPath = Annotated[CheckpointPath, Depends(_path)]


async def _readable(path: _CheckpointPath, access: AccessDep) -> Checkpoint:
    return await access.checkpoint(path)


async def _own(path: _CheckpointPath, access: AccessDep) -> Checkpoint:
    found = await access.gateway.checkpoints.find(path)
    if found is None or not access.caller.may_see(found.owner):
        raise unknown_checkpoint(str(path))
    return found


CHECKPOINT = Refuses(UnknownWeights, rules=["The path must be that of a checkpoint."])

PastSession = Annotated[SessionRecord, Depends(_past_session), Refuses(UnknownSession)]

ReadableCheckpoint = Annotated[Checkpoint, Depends(_readable), CHECKPOINT]
"""The checkpoint in the path, the caller's own or a published one."""

OwnCheckpoint = Annotated[Checkpoint, Depends(_own), CHECKPOINT]
