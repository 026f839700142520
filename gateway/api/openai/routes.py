"""The routes of the side entrance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from gateway.api.openai.answer import Json
from gateway.api.openai.bodies import Body, ChatBody, CompletionBody, parse_body
from gateway.api.openai.entrance import InferenceService
from gateway.api.openai.generation import ClientGone
from gateway.api.openai.models import Listed
from gateway.api.openai.stream import EventStream, Steps
from gateway.api.wire import caller_of, json_response, read_body


async def openai_models(request: Request) -> Response:
    """The base models, and what the caller's runs have saved for sampling."""
    found = await _service_of(request).models.all(caller_of(request))
    return json_response({"object": "list", "data": [_model(one) for one in found]})


async def openai_model(request: Request) -> Response:
    """One model: a base model's name, a `tinker://` path, or the id of a training run."""
    name = request.path_params["model"]
    return json_response(_model(await _service_of(request).models.one(name, caller_of(request))))


async def openai_completions(request: Request) -> Response:
    """Continues prompts, given as text or as tokens."""
    return await _answer(request, parse_body(CompletionBody, await read_body(request)))


async def openai_chat_completions(request: Request) -> Response:
    """Answers messages, which the model's chat template makes a prompt of."""
    return await _answer(request, parse_body(ChatBody, await read_body(request)))


def _service_of(request: Request) -> InferenceService:
    return cast(InferenceService, request.app.state.inference)


async def _answer(request: Request, body: Body) -> Response:
    if body.stream:
        return EventStream(_steps(request, body))
    entrance, caller = _service_of(request), caller_of(request)
    try:
        async with entrance.open(body, caller=caller, receive=request.receive) as job:
            content = await job.whole()
    except ClientGone:
        return Response(status_code=499)  # for the log alone
    response = json_response(content)
    response.headers.update(job.headers)
    return response


async def _steps(request: Request, body: Body) -> Steps:
    entrance, caller = _service_of(request), caller_of(request)
    async with entrance.open(body, caller=caller, receive=request.receive) as job:
        headers: Mapping[str, str] | Sequence[Json] = job.headers
        yield headers
        async for parts in job.parts():
            yield parts


def _model(listed: Listed) -> Json:
    return {
        "id": listed.name,
        "object": "model",
        "created": int(listed.created),
        "owned_by": listed.owner,
        "root": listed.base_model or listed.name,
        "parent": listed.base_model or None,
        "max_model_len": listed.max_length,
    }
