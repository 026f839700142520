"""Traces: addresses that answer an agent as OpenAI's or Anthropic's API, and record its tokens for
training. Also Anthropic's route without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, cast

import orjson
from fastapi import Depends
from fastapi import Response as PlainResponse
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Scope

from gateway.api.bounds import BoundFields
from gateway.api.dependencies import Access, AccessDep
from gateway.api.errors import InvalidParameter
from gateway.api.fields import Answer, PathText
from gateway.api.openai.anthropic import (
    AnthropicAnswer,
    AnthropicError,
    AnthropicForm,
    MessagesRequest,
)
from gateway.api.openai.recording import TurnRecording
from gateway.api.openai.routes import (
    CHAT_RULES,
    MODEL_ERRORS,
    TRACES_PREFIX,
    ServiceDep,
    respond,
    sampled,
    sampling_operation,
    status_of,
)
from gateway.api.openai.schemas import (
    ChatCompletion,
    ChatCompletionRequest,
    ErrorResponse,
    Json,
    ParserName,
)
from gateway.api.request_body import JSON
from gateway.api.routing import PathOperation, Refuses, Router, credential_of
from gateway.core import Gateway
from gateway.owners.auth.identity import Caller
from gateway.recorder.conversation import Conversations, TrainingSequence, encode_messages
from gateway.recorder.store import Trace, unknown_trace
from tandem.errors import TraceEnded, Unauthenticated, UnknownTrace


class TraceOperation(PathOperation):
    """A path operation of an agent, which has the trace's key. The owner's keys work, too."""

    def caller_of(self, scope: Scope) -> Caller:
        gateway = cast(Gateway, scope["app"].state.gateway)
        trace = gateway.recorder.find_by_key(scope["path_params"]["trace_id"], credential_of(scope))
        if trace is None:
            return super().caller_of(scope)
        head = trace.head
        key = gateway.keys.get(head.key_id)
        if key is None or gateway.keys.ended(key) is not None:
            raise Unauthenticated(f"the key {head.key_id} that made the trace is no longer valid")
        caller = Caller(
            owner=head.owner, key_id=head.key_id, role="member", expires_at=head.expires_at
        )
        scope.setdefault("state", {})["caller"] = caller
        return caller


router = Router("/api/tandem/v1/traces", tag="Tandem")
agent_router = Router(
    TRACES_PREFIX + "{trace_id}/v1",
    tag="Agents",
    refusal=ErrorResponse,
    status_of=status_of,
    route_class=TraceOperation,
)


anthropic_router = Router("/v1", tag="Anthropic", refusal=AnthropicError, status_of=status_of)
anthropic_agent_router = Router(
    TRACES_PREFIX + "{trace_id}/v1",
    tag="Agents",
    refusal=AnthropicError,
    status_of=status_of,
    route_class=TraceOperation,
)
_PART_BYTES = 2**20
ANTHROPIC_RESPONSES = sampled(AnthropicAnswer, "With `stream`: Anthropic's events")


async def _trace(trace_id: PathText, access: AccessDep) -> Trace:
    trace = access.gateway.recorder.require_trace(trace_id)
    if not access.caller.may_see(trace.head.owner):
        raise unknown_trace(trace_id)
    return trace


TraceDep = Annotated[Trace, Depends(_trace), Refuses(UnknownTrace)]


class NewTrace(BoundFields):
    """`model` is a base model's name, a `tinker://` path, or a run's id for its newest weights. It
    replaces the model of the agent's requests. Other fields are for requests that do not set
    them."""

    model: str = Field(min_length=1, max_length=400)
    tool_parser: ParserName | None = None
    reasoning_parser: ParserName | None = None


class CreatedTrace(Answer):
    """Anthropic's client takes `base_url`, and OpenAI's takes it with `/v1` behind it. `expires` is
    in seconds since 1970. The key is shown once."""

    id: str
    base_url: str
    key: str
    expires: float


class TracedDatum(Answer):
    """The arguments of the SDK's `Datum`, except the advantages. The lists of `loss_fn_inputs` have
    one entry for each target token."""

    model_input: list[int]
    loss_fn_inputs: dict[str, list[float]]


class TracedVersion(Answer):
    """`tokens` target tokens from number `start` on were sampled from this weight version."""

    start: int
    tokens: int
    version: str
    step: int


class TracedSequence(Answer):
    """A conversation. `steps` are the optimizer steps of the weights behind each target token, null
    for a token that was not sampled. `turns` are the numbers of its answers, and a turn may be in
    several sequences. Then its tokens have the mask 1 in the first one."""

    datum: TracedDatum
    steps: list[int | None]
    versions: list[TracedVersion]
    messages: list[Json]
    turns: list[int]


class TraceInfo(Answer):
    id: str
    model: str
    expires: float
    bytes: int
    turns: int
    sequences: list[TracedSequence]


@router.operation("POST", "", role="member", audit="trace_create", errors=MODEL_ERRORS)
async def create_trace(
    body: NewTrace, access: AccessDep, service: ServiceDep, response: PlainResponse
) -> CreatedTrace:
    """Create a trace. It takes turns for 24 hours, up to 64 MiB, and can be read for one more
    day."""
    caller = access.caller
    async with service.models.resolve(body.model, caller):
        pass
    trace, key = await access.gateway.recorder.create_trace(
        owner=caller.owner,
        key_id=caller.key_id,
        model=body.model,
        fields=body.model_dump(exclude={"model"}, exclude_none=True),
    )
    head = trace.head
    access.audit.note(head.id, model=body.model)
    response.headers["Cache-Control"] = "no-store"
    return CreatedTrace(
        id=head.id,
        base_url=f"{access.base_url}/traces/{head.id}",
        key=key,
        expires=head.expires_at,
    )


@router.operation("GET", "/{trace_id}", role="reader", responses={200: {"model": TraceInfo}})
async def get_trace(trace: TraceDep, access: AccessDep) -> Response:
    """Return the recorded turns as sequences for training."""
    conversations = await access.gateway.recorder.read_turns(trace)
    return StreamingResponse(_encode(trace, conversations), media_type=JSON)


@router.operation("DELETE", "/{trace_id}", role="member", audit="trace_delete")
async def delete_trace(trace: TraceDep, access: AccessDep) -> None:
    """Delete a trace. Its key is refused from now on."""
    await access.gateway.recorder.remove_trace(trace)


@sampling_operation(
    agent_router,
    "/chat/completions",
    rules=CHAT_RULES,
    responses=sampled(ChatCompletion),
    errors=(TraceEnded,),
)
async def trace_chat_completions(
    body: ChatCompletionRequest,
    request: Request,
    service: ServiceDep,
    access: AccessDep,
    trace: TraceDep,
) -> Response:
    """Answer messages as `/v1/chat/completions`, and record the turn. Messages that extend a
    recorded conversation continue its tokens."""
    recording = await start_recording(body, access, trace)
    return await respond(body, request, service, access.caller, recording=recording)


@sampling_operation(anthropic_router, "/messages", rules=CHAT_RULES, responses=ANTHROPIC_RESPONSES)
async def anthropic_messages(
    body: MessagesRequest, request: Request, service: ServiceDep, access: AccessDep
) -> Response:
    """Answer messages in Anthropic's form."""
    return await respond(body.to_chat(), request, service, access.caller, make_form=AnthropicForm)


@sampling_operation(
    anthropic_agent_router,
    "/messages",
    rules=CHAT_RULES,
    responses=ANTHROPIC_RESPONSES,
    errors=(TraceEnded,),
)
async def trace_messages(
    body: MessagesRequest,
    request: Request,
    service: ServiceDep,
    access: AccessDep,
    trace: TraceDep,
) -> Response:
    """Answer messages as `/v1/messages`, and record the turn, as of `/v1/chat/completions`."""
    chat = body.to_chat()
    recording = await start_recording(chat, access, trace)
    return await respond(
        chat, request, service, access.caller, recording=recording, make_form=AnthropicForm
    )


async def start_recording(
    body: ChatCompletionRequest, access: Access, trace: Trace
) -> TurnRecording:
    """Let a request ask for the trace's model. Raises `TraceEnded` and `InvalidParameter`."""
    recorder = access.gateway.recorder
    recorder.check_open(trace)
    if body.continue_final_message or not body.add_generation_prompt:
        raise InvalidParameter(
            "a trace records whole answers: leave out continue_final_message and "
            "add_generation_prompt",
            param="continue_final_message",
        )
    body.model = trace.head.model
    for name, value in trace.head.fields.items():
        if getattr(body, name) is None:
            setattr(body, name, value)
    return TurnRecording(recorder, trace, await recorder.read_turns(trace), body)


def _encode(trace: Trace, conversations: Conversations) -> Iterator[bytes]:
    """Yield the JSON of a `TraceInfo`. Many branches may repeat the tokens of a long conversation,
    so only one sequence at a time is in memory."""
    head = trace.head
    about = {
        "id": head.id,
        "model": head.model,
        "expires": head.expires_at,
        "bytes": trace.bytes,
        "turns": len(conversations.turns),
    }
    ready = orjson.dumps(about)[:-1] + b',"sequences":['
    for number, sequence in enumerate(conversations.sequences()):
        ready += (b"," if number else b"") + orjson.dumps(_described(sequence))
        if len(ready) >= _PART_BYTES:
            yield ready
            ready = b""
    yield ready + b"]}"


def _described(found: TrainingSequence) -> dict[str, Any]:
    """Shift the lists by one: the target of a token is the next one."""
    return {
        "datum": {
            "model_input": found.tokens[:-1],
            "loss_fn_inputs": {
                "target_tokens": found.tokens[1:],
                "logprobs": found.logprobs[1:],
                "mask": found.mask[1:],
            },
        },
        "steps": found.steps[1:],
        "versions": [
            {"start": at - 1, "tokens": run.tokens, "version": run.version, "step": run.step}
            for at, run in found.versions
        ],
        "messages": orjson.Fragment(encode_messages(found.messages)),
        "turns": found.turns,
    }
