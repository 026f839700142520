"""The routes of the OpenAI-compatible API, its event streams, and errors in OpenAI's form,
`{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Annotated, Protocol, cast

import orjson
from fastapi import Depends
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.api.dependencies import AccessDep
from gateway.api.errors import json_response
from gateway.api.fields import PathText
from gateway.api.openai.recording import TurnRecording
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
from gateway.api.openai.service import InferenceService, SamplesInProgress
from gateway.api.request_body import TOKENS_BODY
from gateway.api.routing import Endpoint, Responses, Router, binary
from gateway.owners.auth.identity import Caller
from tandem.errors import (
    GatewayRestarted,
    InternalError,
    OperationTimedOut,
    Overloaded,
    SequenceTooLong,
    SessionFinished,
    StaleVersion,
    TandemError,
    Unauthenticated,
    UnknownModel,
    UnknownRun,
    UnknownWeights,
    WorkerDied,
    WorkerStartFailed,
)
from tandem.telemetry import get_log

PREFIX = "/v1/"
TRACES_PREFIX = "/traces/"
MESSAGES = "/v1/messages"
"""Anthropic's route, also at the end of a trace's path."""
VERSION_HEADER = "X-Tandem-Weight-Version"

MODEL_ERRORS = (UnknownModel, UnknownWeights, UnknownRun)
_RULES = (
    "A field that is unknown, or would change the result in a way that is not offered, is "
    "refused; the sentence says which and why.",
    "A stop string has 1 to 1024 characters, of 64 at most; a token id is one of the vocabulary.",
)
CHAT_RULES = (*_RULES, "The model must have a chat template that takes the messages.")


def status_of(error: TandemError) -> int:
    """Return the HTTP status: 404 for `UnknownModel`, 503 for `WorkerStartFailed`, 504 for
    `OperationTimedOut`."""
    if isinstance(error, SessionFinished | WorkerStartFailed | WorkerDied | GatewayRestarted):
        return 503  # the next request gets a new session and engine
    if isinstance(error, OperationTimedOut):
        return 504
    return error.status


router = Router("/v1", tag="OpenAI", refusal=ErrorResponse, status_of=status_of)


def sampling_operation(
    router: Router,
    path: str,
    *,
    rules: Sequence[str],
    responses: Responses,
    errors: Sequence[type[TandemError]] = (),
) -> Callable[[Endpoint], Endpoint]:
    sampling = (
        *MODEL_ERRORS,
        StaleVersion,
        SequenceTooLong,
        Overloaded,
        WorkerStartFailed,
        OperationTimedOut,
    )
    return router.operation(
        "POST",
        path,
        role="member",
        audit=None,
        errors=(*sampling, *errors),
        rules=rules,
        responses=responses,
        bounds=TOKENS_BODY,
    )


async def _service(request: Request) -> InferenceService:
    return cast(InferenceService, request.app.state.inference)


ServiceDep = Annotated[InferenceService, Depends(_service)]


def sampled(
    model: type[BaseModel],
    about: str = "With `stream`: a line `data: JSON` for each part, the last one `data: [DONE]`",
) -> Responses:
    stream = {"text/event-stream; charset=utf-8": {"schema": binary(about)}}
    return {200: {"model": model, "content": stream}}


@sampling_operation(
    router,
    "/chat/completions",
    rules=CHAT_RULES,
    responses=sampled(ChatCompletion),
)
async def openai_chat_completions(
    body: ChatCompletionRequest, request: Request, service: ServiceDep, access: AccessDep
) -> Response:
    """Answer messages. The model's chat template makes the prompt."""
    return await respond(body, request, service, access.caller)


@sampling_operation(router, "/completions", rules=_RULES, responses=sampled(Completion))
async def openai_completions(
    body: CompletionRequest, request: Request, service: ServiceDep, access: AccessDep
) -> Response:
    """Continue prompts, given as text or as token ids."""
    return await respond(body, request, service, access.caller)


@router.operation("GET", "/models", role="reader")
async def openai_models(service: ServiceDep, access: AccessDep) -> ModelList:
    """List the base models, and the weights for sampling of the caller's runs."""
    return ModelList(object="list", data=await service.models.list_models(access.caller))


@router.operation(
    "GET",
    "/models/{model:path}",
    role="reader",
    errors=MODEL_ERRORS,
    rules=["A `tinker://` path must be one."],
)
async def openai_model(model: PathText, service: ServiceDep, access: AccessDep) -> Model:
    """Return one model: a base model's name, a `tinker://` path, or a training run's id."""
    return await service.models.one(model, access.caller)


class AnswerForm(Protocol):
    """Writes one answer for a kind of client."""

    def whole(self, content: Json) -> Json: ...

    def events(self, parts: Sequence[Json]) -> Iterable[bytes]:
        """Return the events of a stream for some parts of the answer."""
        ...

    def closing(self) -> Iterable[bytes]: ...

    def error(self, error: TandemError) -> bytes: ...


class OpenAIForm:
    """A line `data: JSON` for each part, and `data: [DONE]` at the end."""

    def whole(self, content: Json) -> Json:
        return content

    def events(self, parts: Sequence[Json]) -> Iterable[bytes]:
        return map(_event, parts)

    def closing(self) -> Iterable[bytes]:
        return (b"data: [DONE]\n\n",)

    def error(self, error: TandemError) -> bytes:
        return _event(error_content(error))


async def respond(
    body: InferenceRequest,
    request: Request,
    service: InferenceService,
    caller: Caller,
    *,
    recording: TurnRecording | None = None,
    make_form: Callable[[SamplesInProgress], AnswerForm] = lambda _generation: OpenAIForm(),
) -> Response:
    running = service.start_sampling(
        body, caller=caller, receive=request.receive, recording=recording
    )
    try:
        if body.stream:
            parts = _parts(running, make_form)
            return EventStream(await anext(parts), parts)
        async with running as generation:
            content = await generation.response()
    except ClientDisconnect:
        return Response(status_code=499)  # for the log, as the client is gone
    response = json_response(make_form(generation).whole(content))
    response.headers[VERSION_HEADER] = str(content["tandem_weight_version"])
    return response


Parts = tuple[AnswerForm, list[Json]]


async def _parts(
    running: AbstractAsyncContextManager[SamplesInProgress],
    make_form: Callable[[SamplesInProgress], AnswerForm],
) -> AsyncGenerator[Parts, None]:
    async with running as generation, aclosing(generation.parts()) as steps:
        form = make_form(generation)
        async for parts in steps:
            yield form, parts


class EventStream(StreamingResponse):
    """Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).

    The response starts with the first parts, so an earlier error is an ordinary response. A later
    one ends the stream."""

    media_type = "text/event-stream"

    def __init__(self, first: Parts, others: AsyncGenerator[Parts, None]) -> None:
        form, parts = first
        version = str(parts[0]["tandem_weight_version"])
        no_buffers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(form, parts), headers={VERSION_HEADER: version, **no_buffers})
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._others):
            await super().__call__(scope, receive, send)

    async def _events(self, form: AnswerForm, parts: list[Json]) -> AsyncIterator[bytes]:
        try:
            yield b"".join(form.events(parts))
            async for _form, parts in self._others:
                yield b"".join(form.events(parts))
            yield b"".join(form.closing())
        except ClientDisconnect:
            pass
        except Exception as error:  # noqa: BLE001 - the response has begun
            if not isinstance(error, TandemError):
                get_log().exception("stream_failed")
                error = InternalError(f"{type(error).__name__} in the gateway; see its log")
            yield form.error(error)


def _event(content: Json) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


# --- Errors -------------------------------------------------------------------------------

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""`type` by status. Others are invalid_request_error (4xx) or server_error (5xx)."""

_CODES: dict[type[TandemError], str] = {
    Unauthenticated: "invalid_api_key",
    UnknownModel: "model_not_found",
    UnknownWeights: "model_not_found",
    UnknownRun: "model_not_found",
    SequenceTooLong: "context_length_exceeded",
    Overloaded: "rate_limit_exceeded",
}
"""The `code`s of OpenAI's clients. Other errors have our own type."""


def error_content(error: TandemError) -> dict[str, object]:
    """Return the body: `{"error": {"message": "unknown model 'x'; …", "type": "not_found_error",
    "param": "model", "code": "model_not_found"}}`."""
    status = status_of(error)
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), error.type)
    param = "model" if isinstance(error, MODEL_ERRORS) else getattr(error, "param", None)
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    found = {"message": error.message, "type": kind, "param": param, "code": code, **error.details}
    return {"error": found}


def openai_refusal(error: TandemError) -> Response:
    status = status_of(error)
    response = json_response(error_content(error), status=status)
    if status in (503, 504):
        response.headers["Retry-After"] = "5"  # an engine is starting
    return response
