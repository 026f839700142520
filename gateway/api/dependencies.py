"""What path operations depend on: the gateway, the caller, the audit note, things of the caller.

A dependency that resolves something named in the path raises what it would raise for a thing
that does not exist: an id says nothing about whether another owner has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends
from starlette.requests import Request

from gateway.access import Access
from gateway.api.fields import PathText
from gateway.auth.identity import Caller
from gateway.checkpoints.catalog import Checkpoint
from gateway.core import Gateway
from gateway.identifiers import CheckpointPath, make_checkpoint_path
from gateway.sampling.sessions import SamplingSession
from gateway.sessions.queries import SessionRecord


@dataclass
class AuditNote:
    """What the audit log calls the thing that a request changes, where its path does not name
    it. Names only: no key, no content."""

    target: str = ""
    detail: dict[str, str] = field(default_factory=dict)

    def note(self, target: str, **detail: str) -> None:
        self.target = target
        self.detail = detail


def gateway_of(request: Request) -> Gateway:
    return cast(Gateway, request.app.state.gateway)


def caller_of(request: Request) -> Caller:
    """Return whose key or token came with the request."""
    return cast(Caller, request.state.caller)


async def _gateway(request: Request) -> Gateway:
    return gateway_of(request)


async def _caller(request: Request) -> Caller:
    return caller_of(request)


def audit_note_of(request: Request) -> AuditNote:
    """Return the note that the middleware writes into the audit log."""
    note = AuditNote()
    request.state.audit_note = note
    return note


async def _audit_note(request: Request) -> AuditNote:
    return audit_note_of(request)


async def _access(request: Request) -> Access:
    return gateway_of(request).access


async def _base_url(request: Request) -> str:
    """Return where the client reaches this server, without a slash at the end."""
    return (gateway_of(request).settings.public_url or str(request.base_url)).rstrip("/")


async def _raw_body(request: Request) -> bytes:
    return await request.body()


GatewayDep = Annotated[Gateway, Depends(_gateway)]
CallerDep = Annotated[Caller, Depends(_caller)]
AuditDep = Annotated[AuditNote, Depends(_audit_note)]
BaseUrl = Annotated[str, Depends(_base_url)]
RawBody = Annotated[bytes, Depends(_raw_body)]

AccessDep = Annotated[Access, Depends(_access)]


async def _sampling_session(
    sampler_id: PathText, access: AccessDep, caller: CallerDep
) -> SamplingSession:
    return await access.sampling_session(sampler_id, caller)


async def _past_session(
    session_id: PathText, gateway: GatewayDep, caller: CallerDep
) -> SessionRecord:
    return await gateway.session_queries.session(session_id, caller)


async def _path(run_id: PathText, kind: PathText, name: PathText) -> CheckpointPath:
    return make_checkpoint_path(run_id=run_id, kind=kind, name=name)


_CheckpointPath = Annotated[CheckpointPath, Depends(_path)]


async def _readable(path: _CheckpointPath, access: AccessDep, caller: CallerDep) -> Checkpoint:
    return await access.checkpoint(path, caller)


async def _own(path: _CheckpointPath, access: AccessDep, caller: CallerDep) -> Checkpoint:
    return await access.own_checkpoint(path, caller)


OwnSamplingSession = Annotated[SamplingSession, Depends(_sampling_session)]
"""The sampling session in the path, which can be sampled from."""

PastSession = Annotated[SessionRecord, Depends(_past_session)]
"""The session in the path, active or ended."""

ReadableCheckpoint = Annotated[Checkpoint, Depends(_readable)]
"""The checkpoint in the path: the caller's own, or a published one."""

OwnCheckpoint = Annotated[Checkpoint, Depends(_own)]
"""The checkpoint in the path, to change."""
