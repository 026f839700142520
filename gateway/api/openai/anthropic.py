"""Anthropic's Messages API (https://docs.anthropic.com/en/api/messages), as a form of OpenAI's
chats: requests, answers, events of a stream, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from gateway.api.bounds import BoundFields
from gateway.api.errors import InvalidParameter, json_response
from gateway.api.fields import Answer
from gateway.api.openai.routes import status_of
from gateway.api.openai.schemas import ChatCompletionRequest, Json
from gateway.api.openai.service import SamplesInProgress
from gateway.api.request_body import Texts, validate
from tandem.errors import TandemError, UnsupportedInput

_HARMLESS = frozenset(
    {"metadata", "service_tier", "betas", "container", "context_management", "inference_geo"}
    | {"cache_control", "output_config", "thinking", "diagnostics", "speed"}
)
"""Fields of Anthropic's clients without a meaning here."""

_SAME = (
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_version",
    "max_staleness",
    "tool_parser",
    "reasoning_parser",
    "chat_template_kwargs",
)
"""Fields that OpenAI's form has, too."""

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicTool(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)
    description: str = ""
    input_schema: Json
    type: Literal["custom"] | None = None


class AnthropicMessage(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[Json]


class MessagesRequest(BoundFields):
    """The fields of Anthropic's API, and the parsers' names and bounds of ours."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(min_length=1, max_length=400)
    messages: list[AnthropicMessage] = Field(min_length=1)
    max_tokens: int = Field(ge=1, le=2**31 - 1)
    system: str | list[Json] | None = None
    stop_sequences: Texts | None = None
    stream: bool = False
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    tools: list[AnthropicTool] | None = None
    tool_choice: Json | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template_kwargs: Json | None = None

    def to_chat(self) -> ChatCompletionRequest:
        """Return OpenAI's form. Raises `InvalidParameter` or `UnsupportedInput`."""
        if unknown := (self.model_extra or {}).keys() - _HARMLESS:
            name = min(unknown)[:100]
            raise InvalidParameter(f"unknown field {name!r}; leave it out", param=name)
        messages: list[Json] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system, "system")})
        for at, message in enumerate(self.messages):
            messages += _messages(message, f"messages.{at}")
        chosen, parallel = _tool_choice(self.tool_choice)
        return validate(
            ChatCompletionRequest,
            {
                **{name: getattr(self, name) for name in _SAME},
                "messages": messages,
                "stop": self.stop_sequences,
                "stream": self.stream,
                "stream_options": {"include_usage": True} if self.stream else None,
                "tools": [_tool(tool) for tool in self.tools or ()] or None,
                "tool_choice": chosen,
                "parallel_tool_calls": parallel,
            },
        )


class AnthropicUsage(Answer):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class AnthropicAnswer(Answer):
    """`content` has blocks of the types thinking, text and tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Json]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage
    tandem_weight_version: str


class AnthropicErrorDetails(Answer):
    type: str
    message: str


class AnthropicError(Answer):
    type: Literal["error"]
    error: AnthropicErrorDetails


# --- Requests ------------------------------------------------------------------------------


def _tool(tool: AnthropicTool) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, object] | None) -> tuple[str | Json | None, bool | None]:
    """Return OpenAI's `tool_choice` and `parallel_tool_calls`."""
    if choice is None:
        return None, None
    parallel = False if choice.get("disable_parallel_tool_use") else None
    match choice.get("type"):
        case "auto" | "none" as same:
            return str(same), parallel
        case "any":
            return "required", parallel
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    raise InvalidParameter("tool_choice.type can be auto, any, tool or none", param="tool_choice")


def _messages(message: AnthropicMessage, at: str) -> list[Json]:
    """Return a message as OpenAI's: each tool result is a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[Json] = []
    texts: list[Json] = []
    calls: list[Json] = []
    reasoning = ""
    for block in message.content:
        match block.get("type"):
            case "tool_result":
                content = _text(block.get("content") or "", at)
                found: Json = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
                results.append({**found, "content": content})
            case "tool_use":
                # Unlike orjson, this writes numbers of any size.
                arguments = json.dumps(
                    block.get("input") or {}, ensure_ascii=False, separators=(",", ":")
                )
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "thinking":
                reasoning += str(block.get("thinking") or "")
            case "redacted_thinking":
                pass
            case _:
                texts.append(block)
    if not texts and not calls and results:
        return results
    said: Json = {"role": message.role, "content": _text(texts, at)}
    if calls:
        said["tool_calls"] = calls
    if reasoning:
        said["reasoning_content"] = reasoning
    return [*results, said]


def _text(content: object, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(f"{at} has a content that is neither a text nor blocks", param=at)
    texts = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(block, dict) or kind != "text":
            raise UnsupportedInput(
                f"{at} has a block of type {str(kind)[:40]!r}; this server takes only text"
            )
        texts.append(str(block.get("text") or ""))
    return "\n".join(texts)


# --- Answers -------------------------------------------------------------------------------


class AnthropicForm:
    """Writes one answer: `whole`, or as the events of a stream."""

    def __init__(self, generation: SamplesInProgress) -> None:
        self._generation = generation
        self._index = -1
        self._open = ""
        """The type of the open block."""
        self._finish = "stop"
        self._usage: Json = {}

    def whole(self, content: Json) -> Json:
        """Return an answer from OpenAI's form."""
        choice = cast(list[dict[str, Any]], content["choices"])[0]
        message = choice["message"]
        blocks: list[Json] = []
        if reasoning := message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
        if text := message.get("content"):
            blocks.append({"type": "text", "text": text})
        for call in message.get("tool_calls") or ():
            blocks.append({**_tool_use(call), "input": _arguments(call)})
        self._finish = choice["finish_reason"]
        return {**self._message(content, blocks), **self._end(), "usage": _usage(content)}

    def events(self, parts: Sequence[Json]) -> Iterator[bytes]:
        """Yield the events of some of OpenAI's parts."""
        for part in parts:
            if self._index < 0:
                self._index = 0
                start = {**self._message(part, []), "stop_reason": None, "stop_sequence": None}
                yield _event("message_start", message={**start, "usage": _usage(part)})
            self._usage = _usage(part) if part.get("usage") else self._usage
            for choice in cast(list[dict[str, Any]], part["choices"]):
                self._finish = choice["finish_reason"] or self._finish
                delta = choice["delta"]
                if text := delta.get("reasoning_content"):
                    yield from self._begin("thinking", thinking="", signature="")
                    yield self._delta("thinking_delta", thinking=text)
                if text := delta.get("content"):
                    yield from self._begin("text", text="")
                    yield self._delta("text_delta", text=text)
                for call in delta.get("tool_calls") or ():
                    yield from self._stop()
                    yield from self._begin("tool_use", **{**_tool_use(call), "input": {}})
                    arguments = call["function"]["arguments"]
                    yield self._delta("input_json_delta", partial_json=arguments)

    def closing(self) -> Iterator[bytes]:
        yield from self._stop()
        yield _event("message_delta", delta=self._end(), usage=self._usage or _usage({}))
        yield _event("message_stop")

    def error(self, error: TandemError) -> bytes:
        return _event("error", **{**error_content(error), "type": "error"})

    def _message(self, content: Json, blocks: list[Json]) -> Json:
        return {
            "id": str(content["id"]).replace("chatcmpl-", "msg_"),
            "type": "message",
            "role": "assistant",
            "model": content["model"],
            "content": blocks,
            "tandem_weight_version": content["tandem_weight_version"],
        }

    def _end(self) -> Json:
        stop = self._generation.stop_string
        reason = _STOP_REASONS.get(self._finish, "stop_sequence" if stop else "end_turn")
        return {"stop_reason": reason, "stop_sequence": stop or None}

    def _begin(self, kind: str, **fields: object) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._stop()
            self._open = kind
            block = {**fields, "type": kind}
            yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **fields: object) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _stop(self) -> Iterator[bytes]:
        if self._open:
            yield _event("content_block_stop", index=self._index)
            self._index, self._open = self._index + 1, ""


def _tool_use(call: Mapping[str, Any]) -> Json:
    name = call["function"]["name"]
    return {"type": "tool_use", "id": call["id"].replace("call_", "toolu_"), "name": name}


def _arguments(call: Mapping[str, Any]) -> object:
    """Return the input of a call. Arguments that are no object stay visible as text."""
    try:
        found = orjson.loads(call["function"]["arguments"])
    except orjson.JSONDecodeError:
        found = None
    return found if isinstance(found, dict) else {"arguments": call["function"]["arguments"]}


def _usage(content: Mapping[str, Any]) -> Json:
    usage = content.get("usage") or {}
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage.get("prompt_tokens", 0) - cached,
        "output_tokens": usage.get("completion_tokens", 0),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _event(kind: str, **fields: object) -> bytes:
    data = orjson.dumps({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def error_content(error: TandemError) -> Json:
    status = status_of(error)
    default = "api_error" if status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(status, default)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def anthropic_refusal(error: TandemError) -> Response:
    response = json_response(error_content(error), status=status_of(error))
    if response.status_code in (503, 504):
        response.headers["Retry-After"] = "5"  # an engine is starting
    return response
