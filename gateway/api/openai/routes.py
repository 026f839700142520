"""The routes of the OpenAI-compatible API, and the event streams that two of them answer with."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Annotated, cast

import orjson
from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.api.dependencies import CallerDep
from gateway.api.errors import json_response
from gateway.api.fields import PathText
from gateway.api.openai.errors import error_content, status_of
from gateway.api.openai.schemas import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    ErrorResponse,
    InferenceRequest,
    Json,
    Model,
    ModelList,
)
from gateway.api.openai.service import ClientDisconnected, Generation, InferenceService
from gateway.api.request_body import MOST_TOKENS
from gateway.api.routing import Responses, Router, binary
from tandem.errors import (
    InternalError,
    OperationTimedOut,
    Overloaded,
    SequenceTooLong,
    TandemError,
    UnknownModel,
    UnknownRun,
    UnknownWeights,
    WorkerStartFailed,
)
from tandem.telemetry import get_log

VERSION_HEADER = "X-Tandem-Weight-Version"
_CLIENT_CLOSED_REQUEST = 499
"""The status in the log of a request whose client disconnected; nobody receives it."""

_MODELS = (UnknownModel, UnknownWeights, UnknownRun)
_SAMPLED: tuple[type[TandemError], ...] = (
    *_MODELS,
    SequenceTooLong,
    Overloaded,
    WorkerStartFailed,
    OperationTimedOut,
)
_RULES = (
    "A field that is unknown, or would change the result in a way that is not offered, is "
    "refused; the sentence says which and why.",
    "A stop string has 1 to 1024 characters, of 64 at most; a token id is one of the vocabulary.",
)

router = Router("/v1", tag="OpenAI", refusal=ErrorResponse, status_of=status_of)


async def _service(request: Request) -> InferenceService:
    return cast(InferenceService, request.app.state.inference)


ServiceDep = Annotated[InferenceService, Depends(_service)]


def _sampled(model: type[Completion] | type[ChatCompletion]) -> Responses:
    about = "With `stream`: a line `data: JSON` for each part, the last one `data: [DONE]`"
    stream = {"text/event-stream; charset=utf-8": {"schema": binary(about)}}
    return {200: {"model": model, "content": stream}}


@router.operation(
    "POST",
    "/chat/completions",
    role="member",
    audit=None,
    errors=_SAMPLED,
    rules=[*_RULES, "The model must have a chat template that takes the messages."],
    most_values=MOST_TOKENS,
    responses=_sampled(ChatCompletion),
)
async def openai_chat_completions(
    body: ChatCompletionRequest, request: Request, service: ServiceDep, caller: CallerDep
) -> Response:
    """Answer messages, from which the model's chat template makes a prompt."""
    return await _respond(service.start(body, caller=caller, receive=request.receive), body)


@router.operation(
    "POST",
    "/completions",
    role="member",
    audit=None,
    errors=_SAMPLED,
    rules=_RULES,
    most_values=MOST_TOKENS,
    responses=_sampled(Completion),
)
async def openai_completions(
    body: CompletionRequest, request: Request, service: ServiceDep, caller: CallerDep
) -> Response:
    """Continue prompts, given as text or as token ids."""
    return await _respond(service.start(body, caller=caller, receive=request.receive), body)


@router.operation("GET", "/models", role="reader")
async def openai_models(service: ServiceDep, caller: CallerDep) -> ModelList:
    """List the base models, and what the caller's runs have saved for sampling."""
    return ModelList(object="list", data=await service.models.all(caller))


@router.operation(
    "GET",
    "/models/{model:path}",
    role="reader",
    errors=_MODELS,
    rules=["A `tinker://` path must be one."],
)
async def openai_model(model: PathText, service: ServiceDep, caller: CallerDep) -> Model:
    """Return one model: a base model's name, a `tinker://` path, or the id of a training run."""
    return await service.models.one(model, caller)


async def _respond(
    running: AbstractAsyncContextManager[Generation], body: InferenceRequest
) -> Response:
    try:
        if body.stream:
            parts = _parts(running)
            return EventStream(await anext(parts), parts)
        async with running as sampled:
            content = await sampled.response()
    except ClientDisconnected:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    response = json_response(content)
    response.headers[VERSION_HEADER] = str(content["tandem_weight_version"])
    return response


async def _parts(
    running: AbstractAsyncContextManager[Generation],
) -> AsyncGenerator[list[Json], None]:
    async with running as sampled, aclosing(sampled.parts()) as steps:
        async for parts in steps:
            yield parts


class EventStream(StreamingResponse):
    """Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html): a line
    `data: JSON` for each part, and `data: [DONE]` at the end.

    The response starts with the first parts, so that an earlier error is an ordinary response. A
    later one is sent in the stream, and ends it.
    """

    media_type = "text/event-stream"

    def __init__(self, first: list[Json], others: AsyncGenerator[list[Json], None]) -> None:
        version = str(first[0]["tandem_weight_version"])
        no_buffers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(first), headers={VERSION_HEADER: version, **no_buffers})
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._others):
            await super().__call__(scope, receive, send)

    async def _events(self, parts: list[Json]) -> AsyncIterator[bytes]:
        try:
            yield b"".join(map(_event, parts))
            async for parts in self._others:
                yield b"".join(map(_event, parts))
            yield b"data: [DONE]\n\n"
        except ClientDisconnected:
            pass
        except Exception as error:  # noqa: BLE001 - the response has begun
            if not isinstance(error, TandemError):
                get_log().exception("stream_failed")
                error = InternalError(f"{type(error).__name__} in the gateway; see its log")
            yield _event(error_content(error))


def _event(content: Json) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"
