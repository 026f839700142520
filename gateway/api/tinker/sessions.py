"""Sessions: lists, search, projects, traces."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from gateway.api.times import Moment
from gateway.api.wire import (
    address_of,
    caller_of,
    gateway_of,
    iso,
    json_response,
    note_for_audit,
    parse,
    parse_query,
    read_body,
)
from gateway.auth.identity import Scope, urn_of
from gateway.runs.queries import SessionRecord, Storage
from gateway.sessions.search import Cursor, Filters, Status

ProjectId = Annotated[str, Field(min_length=1, max_length=200)]


class PageQuery(BaseModel):
    limit: int = Field(20, ge=0, le=1000)
    offset: int = Field(0, ge=0, le=2**53)
    access_scope: Scope = "owned"


class ScopeQuery(BaseModel):
    access_scope: Scope = "owned"


class TraceQuery(BaseModel):
    expires: str = ""
    signature: str = ""


class Project(BaseModel):
    project_id: ProjectId


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OwnerFilter(_Strict):
    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = Field(default_factory=list, max_length=10)


class StatusFilter(_Strict):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Annotated[
        list[Literal["success", "errored", "interrupted"]] | None, Field(min_length=1)
    ] = None


class CursorFields(_Strict):
    last_created_at: Moment
    last_session_id: str


class Search(_Strict):
    """An unknown field is refused: a filter that is not applied would show what was not meant."""

    session_id: str | None = None
    project_ids: Annotated[list[str] | None, Field(max_length=1000)] = None
    user_metadata: dict[str, str] = Field(default_factory=dict, max_length=100)
    display_name: Annotated[str | None, Field(min_length=1)] = None
    owner: OwnerFilter = OwnerFilter()
    statuses: Annotated[list[StatusFilter] | None, Field(min_length=1, max_length=10)] = None
    limit: int = Field(50, ge=1, le=200)
    cursor: CursorFields | None = None

    def filters(self) -> Filters:
        return Filters(
            session_id=self.session_id,
            project_ids=tuple(self.project_ids) if self.project_ids is not None else None,
            user_metadata=self.user_metadata,
            display_name=self.display_name,
            owner=self.owner.type,
            owner_urns=tuple(self.owner.owner_urns),
            statuses=tuple(
                Status(type=s.type, reasons=tuple(s.reasons) if s.reasons else None)
                for s in self.statuses
            )
            if self.statuses is not None
            else None,
        )


async def list_sessions(request: Request) -> Response:
    """A page of session ids, newest first."""
    query = parse_query(PageQuery, request)
    found = await gateway_of(request).directory.session_ids(
        caller_of(request), scope=query.access_scope, limit=query.limit, offset=query.offset
    )
    return json_response({"sessions": found})


async def get_session(request: Request) -> Response:
    """What a session has: its runs, its samplers, its metadata."""
    query = parse_query(ScopeQuery, request)
    found = await gateway_of(request).directory.contents(
        request.path_params["session_id"], caller_of(request), scope=query.access_scope
    )
    return json_response(
        {
            "training_run_ids": found.run_ids,
            "sampler_ids": found.sampler_ids,
            "user_metadata": found.session.user_metadata,
            "display_name": found.session.display_name,
        }
    )


async def search_sessions(request: Request) -> Response:
    """A page of summaries, newest first, and the cursor of the next one."""
    gateway, caller = gateway_of(request), caller_of(request)
    body = parse(Search, await read_body(request))
    cursor = None
    if body.cursor is not None:
        cursor = Cursor(
            last_created_at=body.cursor.last_created_at,
            last_session_id=body.cursor.last_session_id,
        )
    page = await gateway.search.page(body.filters(), caller, limit=body.limit, cursor=cursor)
    storage = await gateway.directory.storage_of([session.id for session in page.sessions])
    following = page.next_cursor
    return json_response(
        {
            "sessions": [_summary(s, storage.get(s.id, Storage())) for s in page.sessions],
            "next_cursor": {
                "last_created_at": following.last_created_at,
                "last_session_id": following.last_session_id,
            }
            if following is not None
            else None,
        }
    )


async def assign_session_project(request: Request) -> Response:
    """Moves the session, its runs and what they used into a project. 204."""
    gateway = gateway_of(request)
    session_id = request.path_params["session_id"]
    body = parse(Project, await read_body(request))
    session = await gateway.directory.session(session_id, caller_of(request))
    note_for_audit(
        request, target=session_id, project_id=body.project_id, before=session.project_id
    )
    await gateway.sessions.assign_project(session_id=session_id, project_id=body.project_id)
    return Response(status_code=204)


async def trace_export(request: Request) -> Response:
    """Begins an export, or says where it stands. The address in the answer needs no key."""
    gateway = gateway_of(request)
    session_id = request.path_params["session_id"]
    await gateway.directory.session(session_id, caller_of(request))
    export = await gateway.traces.ask(session_id)
    return json_response(
        {
            "status": export.status,
            "url": address_of(request, export.address) if export.address else None,
            "error": export.error or None,
        }
    )


async def trace_file(request: Request) -> Response:
    """An exported trace. The signature of its address is the key."""
    query = parse_query(TraceQuery, request)
    path = gateway_of(request).traces.find(
        file=request.path_params["file"],
        expires=query.expires,
        signature=query.signature,
    )
    return FileResponse(path, media_type="application/json", filename=path.name)


def _summary(session: SessionRecord, storage: Storage) -> dict[str, object]:
    return {
        "session_id": session.id,
        "created_at": iso(session.created_at),
        "owner": urn_of(session.owner),
        "project_id": session.project_id,
        "status": _status(session),
        "checkpoints_count": storage.count,
        "display_name": session.display_name,
        "user_metadata": session.user_metadata,
        "checkpoint_storage_bytes": storage.bytes,
    }


def _status(session: SessionRecord) -> dict[str, object] | None:
    """None for one that expired: it neither finished nor runs."""
    if session.state == "active":
        return {"type": "active"}
    if session.state == "finished":
        return {
            "type": "client_finished",
            "reason": {"type": session.reason},
            "detail": session.detail or None,
        }
    return None
