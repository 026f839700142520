"""Chat: messages to a run's newest weights, a checkpoint or a base model, two of them side by side.

The answers come as from `/v1/chat/completions`, in the session of such requests, which ends when it
is idle. A form works without a script: `/chat` answers whole, and `/chat/stream` sends one side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, cast

import orjson
from fastapi import Query
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway.api.openai.routes import EventStream, OpenAIForm, Parts
from gateway.api.openai.schemas import (
    NO_PARSER,
    ChatCompletionRequest,
    CompletionRequest,
    InferenceRequest,
    Json,
)
from gateway.api.openai.service import InferenceService, SamplesInProgress
from gateway.api.pages.routing import FORM_CONTENT, Page, PageRouter, read_form
from gateway.api.request_body import FIELDS_BODY, check_json_size, validate
from tandem.errors import InvalidRequest, TandemError, UnsupportedInput

router = PageRouter()

Token = tuple[str, float, Sequence[tuple[str, float]]]

_MOST_LISTED = 200
_ALTERNATIVES = 5
_MOST_TURNS = 200
_PARAMETERS = ("temperature", "top_p", "top_k", "max_tokens", "seed")
_DEFAULTS = {"temperature": "0.7", "top_p": "1", "max_tokens": "256"}


@dataclass(frozen=True)
class ChatTurn:
    """A message, its tokens, and the weight version of an answer. `problem` is in its place. A
    token is its text, its logprob, and the texts and logprobs of its likeliest alternatives."""

    role: str
    text: str
    tokens: Sequence[Token] = ()
    version: str = ""
    problem: str = ""


@dataclass
class Side:
    """One model's conversation. `number` is 1 or 2."""

    number: int
    model: str
    turns: list[ChatTurn] = field(default_factory=list)

    @property
    def history(self) -> str:
        """The conversation as JSON, for the next form."""
        said = ({"role": t.role, "content": t.text} for t in self.turns if not t.problem)
        return orjson.dumps([*said]).decode()


@router.operation("GET", "/chat", role="reader")
async def chat_page(
    request: Request,
    model: Annotated[str, Query(max_length=400)] = "",
    model2: Annotated[str, Query(max_length=400)] = "",
) -> Response:
    """Show the form for messages."""
    form = {**_DEFAULTS, "model": model, "model2": model2}
    return await _render(request, form, _sides(form))


# A browser's form is not JSON.
@router.operation("POST", "/chat", role="member", audit=None, raw=FORM_CONTENT, bounds=FIELDS_BODY)
async def chat(request: Request) -> Response:
    """Answer a message with each chosen model, and show both conversations."""
    form = await read_form(request)
    sides = await asyncio.to_thread(_sides, form)
    try:
        await asyncio.gather(*(_answer(request, form, side) for side in sides))
    except ClientDisconnect:
        return Response(status_code=499)  # for the log, as the client is gone
    return await _render(request, form, sides)


# A browser's form is not JSON.
@router.operation(
    "POST", "/chat/stream", role="member", audit=None, raw=FORM_CONTENT, bounds=FIELDS_BODY
)
async def chat_stream(request: Request) -> Response:
    """Answer a message with the model of the form's `side`, as server-sent events."""
    form = await read_form(request)
    number = 2 if form.get("side") == "2" else 1
    sides = await asyncio.to_thread(_sides, form)
    side = next((each for each in sides if each.number == number), None)
    if side is None:
        raise InvalidRequest("the form names no model; choose one")
    parts = _parts(request, form, side)
    try:
        return EventStream(await anext(parts), parts)
    except ClientDisconnect:
        return Response(status_code=499)


async def _parts(
    request: Request, form: Mapping[str, str], side: Side
) -> AsyncGenerator[Parts, None]:
    sampling = _sampling(request, form, side, stream=True)
    async with sampling as running, aclosing(running.parts()) as steps:
        async for parts in steps:
            yield OpenAIForm(), [_event(part) for part in parts]


async def _answer(request: Request, form: Mapping[str, str], side: Side) -> None:
    """Add the message and its answer, or the reason why there is none, to the conversation."""
    message = form.get("message", "").strip()
    try:
        async with _sampling(request, form, side, stream=False) as running:
            event = _event(await running.response())
    except TandemError as error:
        answer = ChatTurn("assistant", "", problem=error.message)
    else:
        tokens = cast(Sequence[Token], event["tokens"])
        version = str(event["tandem_weight_version"])
        answer = ChatTurn("assistant", str(event["text"]), tokens=tokens, version=version)
    side.turns += [ChatTurn("user", message), answer]


@asynccontextmanager
async def _sampling(
    request: Request, form: Mapping[str, str], side: Side, *, stream: bool
) -> AsyncIterator[SamplesInProgress]:
    """Start an answer. A model without a chat template gets plain text."""
    service, caller = _service(request), Page(request).caller

    async def begin(mode: str) -> SamplesInProgress:
        asked = _sample_request({**form, "mode": mode}, side, stream=stream)
        sampling = service.start_sampling(asked, caller=caller, receive=request.receive)
        return await stack.enter_async_context(sampling)

    async with AsyncExitStack() as stack:
        mode = form.get("mode", "")
        try:
            running = await begin(mode)
        except UnsupportedInput:
            if mode:
                raise
            running = await begin("text")
        yield running


def _event(part: Json) -> Json:
    """Return a part's text and tokens in one form for chats and completions."""
    choice: dict[str, Any] = next(iter(cast(list[Json], part["choices"])), {})
    said = choice.get("message") or choice.get("delta") or {}
    return {
        "text": said.get("content") or choice.get("text") or "",
        "tokens": _tokens(choice.get("logprobs") or {}),
        "tandem_weight_version": part["tandem_weight_version"],
    }


def _tokens(logprobs: Mapping[str, Any]) -> list[Token]:
    if "content" in logprobs:
        return [
            (
                each["token"],
                each["logprob"],
                [(other["token"], other["logprob"]) for other in each["top_logprobs"]],
            )
            for each in logprobs["content"]
        ]
    columns = (logprobs.get(name, ()) for name in ("tokens", "token_logprobs", "top_logprobs"))
    return [(text, own, [*top.items()]) for text, own, top in zip(*columns, strict=True)]


def _sample_request(form: Mapping[str, str], side: Side, *, stream: bool) -> InferenceRequest:
    """Return the request of a form for one side. Raises `InvalidRequest`."""
    message = form.get("message", "")
    if not message.strip():
        raise InvalidRequest("the message is empty; write one")
    fields: dict[str, object] = {name: form[name] for name in _PARAMETERS if form.get(name)}
    fields |= {"model": side.model, "stream": stream}
    if form.get("mode") == "text":
        asked = {**fields, "prompt": message, "logprobs": _ALTERNATIVES}
        return validate(CompletionRequest, asked)
    system = form.get("system", "").strip()
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    messages += [{"role": turn.role, "content": turn.text} for turn in side.turns]
    messages.append({"role": "user", "content": message})
    asked = {**fields, "messages": messages, "logprobs": True, "top_logprobs": _ALTERNATIVES}
    asked["reasoning_parser"] = NO_PARSER  # the page shows all text
    return validate(ChatCompletionRequest, asked)


def _sides(form: Mapping[str, str]) -> list[Side]:
    """Return the conversations of a form, one for each chosen model."""
    models = [(1, form.get("model", "")), (2, form.get("model2", ""))]
    return [
        Side(number, model, _turns(form.get(f"history{number}", "")))
        for number, model in models
        if model
    ]


def _turns(history: str) -> list[ChatTurn]:
    """Return earlier turns. Raises `InvalidRequest` or `PayloadTooLarge`."""
    content = history.encode()
    check_json_size(content)
    try:
        said = orjson.loads(content or b"[]")
        if len(said) > _MOST_TURNS:
            raise InvalidRequest(
                f"the conversation has {len(said)} turns, {_MOST_TURNS} at most; begin a new chat"
            )
        return [ChatTurn(str(each["role"]), str(each["content"])) for each in said]
    except (orjson.JSONDecodeError, TypeError, KeyError) as error:
        raise InvalidRequest("the form's history is damaged; load the page again") from error


async def _render(request: Request, form: Mapping[str, str], sides: Sequence[Side]) -> Response:
    page = Page(request)
    listed = await _models(page, _service(request))
    known = {value for _, options in listed for value, _ in options}
    given = [(side.model, side.model) for side in sides if side.model not in known]
    make = partial(
        page.render,
        "chat.html",
        form={**dict.fromkeys(("model", "model2", "system", "mode", *_PARAMETERS), ""), **form},
        sides=sides,
        models=[*([("Given", given)] if given else []), *listed],
    )
    return await page.draw(make)


async def _models(page: Page, service: InferenceService) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the caller's models by kind, each with its value and its name."""
    gateway = page.gateway
    found, _ = await gateway.run_records.runs(
        page.caller, scope="accessible", limit=_MOST_LISTED, offset=0
    )
    runs = [
        (run.id, run.identity.name or run.id)
        for run in found
        if run.last_sampler is not None or ((live := gateway.runs.get(run.id)) and live.newest)
    ]
    names = {run.id: run.identity.name or run.id for run in found}
    models = await service.models.list_models(page.caller)
    saved, base = list[tuple[str, str]](), list[tuple[str, str]]()
    for each in models:
        if not each.id.startswith("tinker://"):
            base.append((each.id, each.id))
        elif len(saved) < _MOST_LISTED:
            run, _, name = each.id.removeprefix("tinker://").partition("/sampler_weights/")
            saved.append((each.id, f"{names.get(run, run)} / {name}"))
    kinds = [("Runs, newest weights", runs), ("Checkpoints", saved), ("Base models", base)]
    return [(kind, options) for kind, options in kinds if options]


def _service(request: Request) -> InferenceService:
    return cast(InferenceService, request.app.state.inference)
