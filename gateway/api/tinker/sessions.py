"""Sessions: their life, lists, search, projects and traces."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated, Literal

from fastapi import Query
from pydantic import BaseModel, Field
from starlette.responses import StreamingResponse

from gateway.api.dependencies import BLUEPRINT, AccessDep, PastSession
from gateway.api.fields import Answer, Limit, Moment, Offset, PathText, Time, UserMetadata
from gateway.api.request_body import STORED_BODY
from gateway.api.routing import Router, file_response
from gateway.api.tinker.service import ASKS, SDK_VERSION, check_sdk_version
from gateway.owners.auth.identity import Scope, urn_of
from gateway.owners.sessions.queries import Cursor, EndReason, SessionFilters, SessionRecord
from gateway.owners.sessions.registry import Metadata, NewSession
from gateway.owners.usage.trace_exports import PREFIX
from gateway.runs.record.rows import Storage
from gateway.workers.run_options import RunOptions, options_of
from tandem.errors import (
    AddressExpired,
    AddressForged,
    PermissionDenied,
    SessionFinished,
    UnknownSession,
)
from tandem.settings.chosen_names import Label

_LONGEST_DETAIL = 4000
"""Characters. Every operation that the session's end fails repeats them."""

_LONGEST_DEADLINE = 86_400.0
"""Seconds, of the runs in a session of the role `ci`."""

router = Router("/api/v1", tag="SDK")
files_router = Router(tag="SDK")


class CreateSession(BaseModel):
    user_metadata: Metadata | None = None
    display_name: str | None = Field(None, max_length=500)
    project_id: Annotated[Label, Field(max_length=200)] | None = None
    tags: list[Annotated[str, Field(max_length=200)]] = Field(default_factory=list, max_length=100)
    sdk_version: str = Field("", max_length=64)


class Heartbeat(BaseModel):
    session_id: str


class FinishReason(BaseModel):
    type: EndReason


class Finish(BaseModel):
    """The client's reason for a session's end. A long `detail`, such as a traceback, is cut."""

    reason: FinishReason
    detail: str | None = None


class Project(BaseModel):
    project_id: Annotated[Label, Field(min_length=1, max_length=200)]


class SearchCursor(Cursor):
    last_created_at: Moment


class Search(SessionFilters):
    """Unknown fields are refused, because an ignored filter would show too much."""

    limit: int = Field(50, ge=1, le=200)
    cursor: SearchCursor | None = None


class CreatedSession(Answer):
    type: Literal["create_session"]
    session_id: str
    warning_message: str | None


class Beat(Answer):
    type: Literal["session_heartbeat"]


class SessionIds(Answer):
    sessions: list[str]


class SessionContents(Answer):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: UserMetadata
    display_name: str | None


class Ended(Answer):
    type: EndReason


class SessionState(Answer):
    type: Literal["active", "client_finished"]
    reason: Ended | None = None
    detail: str | None = None


class SessionSummary(Answer):
    """The status is null for an expired session."""

    session_id: str
    created_at: Time
    owner: str
    project_id: str | None
    status: SessionState | None
    checkpoints_count: int
    display_name: str | None
    user_metadata: UserMetadata
    checkpoint_storage_bytes: int


class NextPage(Answer):
    last_created_at: Time
    last_session_id: str


class SessionPage(Answer):
    sessions: list[SessionSummary]
    next_cursor: NextPage | None


class TraceExport(Answer):
    """The address needs no key."""

    status: Literal["pending", "ready", "failed"]
    url: str | None
    error: str | None


@router.operation(
    "POST",
    "/session_heartbeat",
    role="ci",
    audit=None,
    errors=[UnknownSession, SessionFinished],
)
async def session_heartbeat(body: Heartbeat, access: AccessDep) -> Beat:
    """Keep a session alive. 410 for an ended one, which stops the SDK's loop."""
    await access.session(body.session_id)
    return Beat(type="session_heartbeat")


@router.operation(
    "POST",
    "/create_session",
    role="ci",
    audit="session_create",
    rules=[*SDK_VERSION, ASKS],
    bounds=STORED_BODY,
)
async def create_session(body: CreateSession, access: AccessDep) -> CreatedSession:
    """Begin a session. An SDK that is too old is refused. An untested one gets a warning for its
    log."""
    warning = check_sdk_version(body.sdk_version)
    options = options_of(
        None,
        body.user_metadata,
        model="",
        settings=access.gateway.settings,
        groups=access.gateway.groups(),
        admin=access.caller.role == "admin",
    )
    if access.caller.reach == "blueprints":
        _check_of_blueprint(body.user_metadata, options)
    fields = body.model_dump() | {"project_id": body.project_id or ""}
    access.gateway.playground.check_project(fields["project_id"], access.caller.key_id)
    session = await access.gateway.sessions.create(NewSession(owner=access.caller.owner, **fields))
    access.audit.note(session.id)
    return CreatedSession(type="create_session", session_id=session.id, warning_message=warning)


@router.operation(
    "POST",
    "/sessions/{session_id}/finish",
    role="ci",
    overseen=True,
    audit="session_finish",
    errors=[UnknownSession],
)
async def finish_session(session_id: PathText, body: Finish, access: AccessDep) -> None:
    """End a session. Answers when its workers have stopped, or should have. Only the first reason
    counts."""
    access.audit.note(session_id, reason=body.reason.type)
    with suppress(SessionFinished):  # an ended session keeps its reason; this waits for the end
        await access.session(session_id)
    await access.gateway.end_session(
        session_id=session_id,
        state="finished",
        reason=body.reason.type,
        detail=(body.detail or "")[:_LONGEST_DETAIL],
    )


@router.operation("GET", "/sessions", role="reader", overseen=True)
async def list_sessions(
    access: AccessDep,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Annotated[Scope, Query()] = "owned",
) -> SessionIds:
    """Return a page of session ids, newest first."""
    found = await access.gateway.session_queries.session_ids(
        access.caller, scope=access_scope, limit=limit, offset=offset
    )
    return SessionIds(sessions=found)


@router.operation(
    "POST",
    "/sessions/search",
    role="reader",
    overseen=True,
    audit=None,
    rules=["A cursor must be that of a page before, for the same filters."],
)
async def search_sessions(body: Search, access: AccessDep) -> SessionPage:
    """Return a page of summaries, newest first, and the next cursor."""
    sessions, next_cursor = await access.gateway.session_queries.search(
        body, access.caller, limit=body.limit, cursor=body.cursor
    )
    storage = await access.gateway.run_records.storage_of([session.id for session in sessions])
    return SessionPage(
        sessions=[_summary(s, storage.get(s.id, Storage())) for s in sessions],
        next_cursor=NextPage.of(next_cursor) if next_cursor is not None else None,
    )


@router.operation(
    "GET", "/sessions/{session_id}", role="reader", overseen=True, errors=[UnknownSession]
)
async def get_session(
    session_id: PathText, access: AccessDep, access_scope: Annotated[Scope, Query()] = "owned"
) -> SessionContents:
    """Return a session's runs, samplers and metadata."""
    session = await access.gateway.session_queries.session(
        session_id, access.caller, scope=access_scope
    )
    run_ids, sampler_ids = await access.gateway.session_queries.contents(session_id)
    return SessionContents.of(session, training_run_ids=run_ids, sampler_ids=sampler_ids)


@router.operation("PUT", "/sessions/{session_id}/project", role="member", audit="project_assign")
async def assign_session_project(body: Project, session: PastSession, access: AccessDep) -> None:
    """Move the session, its runs and their usage into a project."""
    access.audit.note(session.id, project_id=body.project_id, before=session.project_id)
    for project_id in (body.project_id, session.project_id):
        access.gateway.playground.check_project(project_id, access.caller.key_id)
    await access.gateway.sessions.assign_project(session_id=session.id, project_id=body.project_id)


@router.operation("GET", "/sessions/{session_id}/trace_export", role="reader")
async def trace_export(session: PastSession, access: AccessDep) -> TraceExport:
    """Return the signed address of the session's trace until now."""
    url = f"{access.base_url}{access.gateway.traces.address(session.id)}"
    return TraceExport(status="ready", url=url, error=None)


@files_router.operation(
    "GET",
    PREFIX + "{file}",
    role="signature",
    errors=[AddressForged, AddressExpired],
    responses={200: file_response("application/json", "A trace, as the Chrome trace viewer reads")},
)
async def trace_file(
    access: AccessDep,
    file: PathText,
    expires: Annotated[str, Query()] = "",
    signature: Annotated[str, Query()] = "",
) -> StreamingResponse:
    """Return a session's trace, generated while it is sent."""
    content = access.gateway.traces.generate(file=file, expires=expires, signature=signature)
    return StreamingResponse(
        content,
        media_type="application/json",
        headers={"Content-Disposition": f'attachment; filename="{file}"'},
    )


def _summary(session: SessionRecord, storage: Storage) -> SessionSummary:
    status: SessionState | None = None
    if session.state == "active":
        status = SessionState(type="active")
    elif session.state == "finished":
        reason = Ended(type=session.reason)
        status = SessionState(type="client_finished", reason=reason, detail=session.detail or None)
    return SessionSummary.of(
        session,
        session_id=session.id,
        owner=urn_of(session.owner),
        status=status,
        checkpoints_count=storage.count,
        checkpoint_storage_bytes=storage.bytes,
    )


def _check_of_blueprint(metadata: Metadata | None, options: RunOptions) -> None:
    """Raise `PermissionDenied` unless the session names its blueprint, and its runs end within a
    day. The gateway cannot see the program."""
    now = time.time()
    ends_at = options.deadline_at(now)
    if not (metadata or {}).get(BLUEPRINT) or ends_at is None or ends_at > now + _LONGEST_DEADLINE:
        raise PermissionDenied(
            f"the user_metadata of a session of the role ci has {BLUEPRINT}, and a tandem.deadline "
            f"of at most {_LONGEST_DEADLINE:g} seconds; `tandem blueprint run` gives both"
        )
