"""The routes of the OpenAI-compatible API, and the event streams that two of them answer with."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, aclosing
from typing import cast

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.api.openai.errors import error_content
from gateway.api.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    Json,
    ModelList,
    SamplingFields,
    parse_request,
)
from gateway.api.openai.service import ClientDisconnected, InferenceService, RunningRequest
from gateway.api.wire import caller_of, json_response, read_body
from tandem.errors import InternalError, TandemError
from tandem.telemetry import get_log

VERSION_HEADER = "X-Tandem-Weight-Version"
_CLIENT_CLOSED_REQUEST = 499
"""The status in the log of a request whose client disconnected; nobody receives it."""


async def openai_models(request: Request) -> Response:
    """List the base models, and what the caller's runs have saved for sampling."""
    models = await _service_of(request).models.all(caller_of(request))
    return json_response(ModelList(object="list", data=models).model_dump())


async def openai_model(request: Request) -> Response:
    """Return one model: a base model's name, a `tinker://` path, or the id of a training run."""
    name = request.path_params["model"]
    return json_response(
        (await _service_of(request).models.one(name, caller_of(request))).model_dump()
    )


async def openai_completions(request: Request) -> Response:
    """Continue prompts, given as text or as token ids."""
    return await _respond(request, parse_request(CompletionRequest, await read_body(request)))


async def openai_chat_completions(request: Request) -> Response:
    """Answer messages, from which the model's chat template makes a prompt."""
    return await _respond(request, parse_request(ChatCompletionRequest, await read_body(request)))


def _service_of(request: Request) -> InferenceService:
    return cast(InferenceService, request.app.state.inference)


async def _respond(request: Request, body: SamplingFields) -> Response:
    running = _service_of(request).start(body, caller=caller_of(request), receive=request.receive)
    if body.stream:
        return EventStream(running)
    try:
        async with running as sampled:
            content = await sampled.response()
    except ClientDisconnected:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    response = json_response(content)
    response.headers[VERSION_HEADER] = sampled.weight_version
    return response


class EventStream(Response):
    """Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html): a line
    `data: JSON` for each part, and `data: [DONE]` at the end.

    The response starts with the first parts, so that an earlier error is an ordinary response. A
    later one is sent in the stream, and ends it.
    """

    def __init__(self, running: AbstractAsyncContextManager[RunningRequest]) -> None:
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with self._running as sampled, aclosing(sampled.parts()) as steps:
                async for parts in steps:
                    if not started:
                        await send(_start(sampled.weight_version))
                        started = True
                    await send(_body(b"".join(map(_event, parts))))
            await send(_body(b"data: [DONE]\n\n"))
        except ClientDisconnected:
            pass
        except Exception as error:
            if not started:
                raise
            if not isinstance(error, TandemError):
                get_log().exception("stream_failed", path=scope["path"])
                error = InternalError(f"{type(error).__name__} in the gateway; see its log")
            await send(_body(_event(error_content(error))))
        if started:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await Response(status_code=_CLIENT_CLOSED_REQUEST)(scope, receive, send)


def _start(weight_version: str) -> dict[str, object]:
    headers = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        VERSION_HEADER.lower(): weight_version,
    }
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }


def _body(content: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": content, "more_body": True}


def _event(content: Json) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"
