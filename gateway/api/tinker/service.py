"""Health, configuration of the client, capabilities, sessions, telemetry."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.tinker.sdk_version import check_sdk_version, json_refused
from gateway.api.wire import (
    SMALL_BODY,
    caller_of,
    gateway_of,
    json_response,
    note_for_audit,
    parse,
    read_body,
)
from gateway.sessions.metadata import Metadata
from gateway.sessions.registry import NewSession
from tandem.errors import SessionFinished

_LONGEST_DETAIL = 4000
"""Characters. Every operation that the end of a session fails repeats them."""


class CreateSession(BaseModel):
    user_metadata: Metadata | None = None
    display_name: str | None = Field(None, max_length=500)
    project_id: str | None = Field(None, max_length=200)
    tags: list[Annotated[str, Field(max_length=200)]] = Field(default_factory=list, max_length=100)
    sdk_version: str = Field("", max_length=64)


class ClientConfig(BaseModel):
    sdk_version: str = ""


class TelemetryBatch(BaseModel):
    events: list[object] = Field(default_factory=list)


class Heartbeat(BaseModel):
    session_id: str


class FinishReason(BaseModel):
    type: Literal["success", "errored", "interrupted"]


class Finish(BaseModel):
    """Of a longer `detail`, such as a whole traceback, the end is not kept."""

    reason: FinishReason
    detail: str | None = None


async def healthz(_request: Request) -> Response:
    """Whether the gateway is there."""
    return json_response({"status": "ok"})


async def client_config(request: Request) -> Response:
    """How the client should behave. Everything that is not said here has the SDK's default.
    The first call of every client that asks for it, so that one that is too old is told before
    anything else."""
    check_sdk_version(parse(ClientConfig, await read_body(request) or b"{}").sdk_version)
    return json_response(
        {
            # The SDK exchanges its key for a token, without which `whoami` would not work.
            "pjwt_auth_enabled": True,
            "credential_default_source": "api_key",
            # Chunks of one batch are sent at once, and their places in the log keep the order.
            # Their sizes are the SDK's (1024 datums, 5 MB): large enough for a full micro-batch
            # each, small enough that the first is computed while the others still come.
            "parallel_fwdbwd_chunks": True,
            # Costs more than the loopback or a local network does, and pays on a slow line.
            "proto_compress_fwdbwd": gateway_of(request).settings.compress_payloads,
            # A poll of its own for each sample is as fast (300 short samples with a real engine
            # on a loopback: 1.1 to 2.0 s either way), and survives a restart of the gateway: a
            # client of the common poll could not be told which of its samples are gone.
            "sample_use_retrieve_futures": False,
            "custom_loss_server_side": True,
            # Clients of one sampling session get numbers that nobody else has, where they would
            # draw random ones.
            "sample_join_sampling_session": True,
        }
    )


async def dynamic_config(_request: Request) -> Response:
    """What the client asks for again and again. Clients tell us of samples that they gave up,
    at most so many at once."""
    return json_response(
        {
            "refresh_interval_sec": 300,
            "sample_cancel_enabled": True,
            "sample_cancel_max_batch_size": 64,
        }
    )


async def capabilities(request: Request) -> Response:
    """The base models that are there."""
    return json_response(
        {
            "supported_models": [
                {
                    "model_name": entry.name,
                    "max_context_length": entry.max_length,
                    "trainable": True,
                    "sampleable": True,
                }
                for entry in gateway_of(request).models.all()
            ]
        }
    )


async def create_session(request: Request) -> Response:
    """Begins a session. 400 for an SDK that is too old; one that was not tested gets a warning
    for its log."""
    body = parse(CreateSession, await read_body(request, limit=SMALL_BODY))
    warning = check_sdk_version(body.sdk_version)
    session = await gateway_of(request).sessions.create(
        NewSession(
            owner=caller_of(request).owner,
            project_id=body.project_id or "",
            display_name=body.display_name,
            user_metadata=body.user_metadata,
            tags=body.tags,
            sdk_version=body.sdk_version,
        )
    )
    note_for_audit(request, target=session.id)
    return json_response(
        {"type": "create_session", "session_id": session.id, "warning_message": warning}
    )


async def session_heartbeat(request: Request) -> Response:
    """Keeps a session alive. 410 for one that has ended, which stops the SDK's loop."""
    body = parse(Heartbeat, await read_body(request))
    await gateway_of(request).access.session(body.session_id, caller_of(request))
    return json_response({"type": "session_heartbeat"})


async def finish_session(request: Request) -> Response:
    """Ends a session. Answers when its workers are stopped. The first reason counts."""
    gateway = gateway_of(request)
    session_id = request.path_params["session_id"]
    body = parse(Finish, await read_body(request))
    note_for_audit(request, target=session_id, reason=body.reason.type)
    with suppress(SessionFinished):  # the first reason counts; we only wait for the end
        await gateway.access.session(session_id, caller_of(request))
    await gateway.end_session(
        session_id=session_id,
        state="finished",
        reason=body.reason.type,
        detail=(body.detail or "")[:_LONGEST_DETAIL],
    )
    return Response(status_code=204)


async def forward_of_old_sdk(_request: Request) -> Response:
    """An endpoint that SDKs before 0.25 had; newer ones send forward to forward_backward."""
    raise json_refused("forward")


async def telemetry(request: Request) -> Response:
    """Counted and dropped: what a client sends about itself is not kept."""
    batch = parse(TelemetryBatch, await read_body(request))
    gateway_of(request).metrics.telemetry_events.inc(len(batch.events))
    return json_response({"status": "accepted"})
