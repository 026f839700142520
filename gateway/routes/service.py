"""Health, configuration of the client, capabilities, sessions, telemetry."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.routes.wire import gateway_of, json_response, parse, read_body
from tandem.errors import SessionFinished


class CreateSession(BaseModel):
    user_metadata: dict[str, object] | None = None
    display_name: str | None = Field(None, max_length=500)


class Heartbeat(BaseModel):
    session_id: str


class FinishReason(BaseModel):
    type: Literal["success", "errored", "interrupted"]


class Finish(BaseModel):
    reason: FinishReason
    detail: str | None = None


async def healthz(_request: Request) -> Response:
    return json_response({"status": "ok"})


async def client_config(_request: Request) -> Response:
    """Everything that is not said here has the SDK's default."""
    return json_response(
        {
            "pjwt_auth_enabled": False,
            "credential_default_source": "api_key",
            "parallel_fwdbwd_chunks": True,
            # Compression costs more than the loopback or a local network does.
            "proto_compress_fwdbwd": False,
            "sample_use_retrieve_futures": False,
            "custom_loss_server_side": True,
            "sample_join_sampling_session": False,
        }
    )


async def dynamic_config(_request: Request) -> Response:
    return json_response({"refresh_interval_sec": 300, "sample_cancel_enabled": False})


async def capabilities(request: Request) -> Response:
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
    body = parse(CreateSession, await read_body(request))
    session = await gateway_of(request).sessions.create(
        display_name=body.display_name, user_metadata=body.user_metadata
    )
    return json_response({"type": "create_session", "session_id": session.id})


async def session_heartbeat(request: Request) -> Response:
    """410 for a session that has ended, which stops the SDK's loop."""
    body = parse(Heartbeat, await read_body(request))
    await gateway_of(request).sessions.require(body.session_id)
    return json_response({"type": "session_heartbeat"})


async def finish_session(request: Request) -> Response:
    """Answers when the session's workers are stopped. The first reason counts."""
    gateway = gateway_of(request)
    session_id = request.path_params["session_id"]
    body = parse(Finish, await read_body(request))
    with suppress(SessionFinished):  # the first reason counts; we only wait for the end
        await gateway.sessions.require(session_id)
    await gateway.end_session(
        session_id=session_id, state="finished", reason=body.reason.type, detail=body.detail or ""
    )
    return Response(status_code=204)


async def telemetry(request: Request) -> Response:
    """Accepted and dropped: what a client sends about itself is not kept."""
    await read_body(request)
    return json_response({"status": "accepted"})
