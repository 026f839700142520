"""Tool calls and reasoning in answers.

vLLM's parsers in the sampler read them. With `tool_choice` "required" or a named tool, the answer
is JSON, and a structured output enforces its form. So it needs no parser."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import orjson

from gateway.api.openai.schemas import NO_PARSER, ChatCompletionRequest, InferenceRequest, Json
from tandem.v1 import sampler_pb2

_MOST_CALLS = 16
"""The calls of one answer with the tool_choice "required"."""

# A sign in a model's chat template, and the parser of its form. The first match counts.
_TOOL_PARSERS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
)
_REASONING_PARSERS = (
    ("<｜Assistant｜>", "deepseek_r1"),
    ("<arg_key>", "glm45"),
    ("</think>", "qwen3"),
)


@dataclass(frozen=True)
class Parsers:
    """Names of vLLM's parsers, "" for none."""

    tools: str = ""
    reasoning: str = ""

    @classmethod
    def of_template(cls, text: str) -> Parsers:
        """Return the parsers that fit a model's chat template."""
        return cls(
            next((name for sign, name in _TOOL_PARSERS if sign in text), ""),
            next((name for sign, name in _REASONING_PARSERS if sign in text), ""),
        )


def message_parsing(
    request: InferenceRequest, parsers: Parsers
) -> sampler_pb2.MessageParsing | None:
    """Return the parsers for a request's answers, None if nothing is parsed."""
    if not isinstance(request, ChatCompletionRequest) or forced_tool(request) is not None:
        return None
    tools = request.shown_tools
    wanted = request.tool_parser or parsers.tools
    tool_parser = wanted if tools and wanted != NO_PARSER else ""
    wanted = request.reasoning_parser or parsers.reasoning
    reasoning_parser = wanted if wanted != NO_PARSER else ""
    if not tool_parser and not reasoning_parser:
        return None
    fields = {
        "tools": tools,
        "tool_choice": "auto" if tools else None,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    return sampler_pb2.MessageParsing(
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        request=json.dumps({name: value for name, value in fields.items() if value is not None}),
    )


def forced_tool(request: ChatCompletionRequest) -> str | None:
    """Return the name of the tool that the answer must call, "" for any, None for no obligation."""
    if isinstance(request.tool_choice, dict):
        return str(cast(Mapping[str, Any], request.tool_choice)["function"]["name"])
    return "" if request.tool_choice == "required" else None


def forced_form(request: ChatCompletionRequest) -> Json | None:
    """Return the JSON schema of an answer that must call a tool."""
    name = forced_tool(request)
    if name is None:
        return None
    schemas = {
        str(function["name"]): function.get("parameters") or {"type": "object"}
        for tool in request.tools or ()
        if isinstance(function := tool.get("function"), dict)
    }
    if name:
        return cast(Json, schemas[name])
    one = [
        {
            "type": "object",
            "properties": {"name": {"const": each}, "parameters": schema},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for each, schema in schemas.items()
    ]
    most = 1 if request.parallel_tool_calls is False else _MOST_CALLS
    return {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": one}}


def forced_message(request: ChatCompletionRequest, text: str) -> Json:
    """Return the parsed message of an answer that had to call a tool. Text that was cut off, or
    has another form, is content."""
    name = forced_tool(request)
    try:
        found = orjson.loads(text)
        if name:
            return {"tool_calls": [{"name": name, "arguments": text}]}
        calls = [
            {
                "name": str(call["name"]),
                "arguments": json.dumps(call["parameters"], ensure_ascii=False),
            }
            for call in found
        ]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return {"content": text}
    return {"tool_calls": calls}


def tool_call(call: Mapping[str, object]) -> Json:
    """Return OpenAI's form of a parsed call."""
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call["name"], "arguments": call["arguments"]},
    }
