"""A request's messages as templates want them: contents are texts, arguments are objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from gateway.api.openai.bodies import ChatBody
from gateway.api.openai.chat_template import ChatTemplate, check_variables
from gateway.api.openai.errors import FieldRefused
from tandem.errors import UnsupportedInput

Json = Mapping[str, object]


def render_chat(template: ChatTemplate, body: ChatBody) -> str:
    """The text of a chat. Raises `InvalidRequest`, or one of its kinds."""
    if body.add_generation_prompt and body.continue_final_message:
        raise FieldRefused(
            "an answer either continues the last message or begins a new one: with "
            "continue_final_message, set add_generation_prompt to false",
            param="continue_final_message",
        )
    more = body.chat_template_kwargs or {}
    check_variables(more)
    return template.render(
        [_message(message, at=index) for index, message in enumerate(body.messages)],
        tools=_tools(body),
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        more=more,
    )


def _tools(body: ChatBody) -> Sequence[Json] | None:
    """Those that the template is shown. Which of them is called is the model's to choose."""
    if body.tool_choice not in (None, "none", "auto"):
        raise FieldRefused(
            "tool_choice can be none or auto: calls are the model's own text; to force a form, "
            "use structured_outputs",
            param="tool_choice",
        )
    return body.tools if body.tools and body.tool_choice != "none" else None


def _message(message: Json, *, at: int) -> Json:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise FieldRefused(f"messages.{at} has no role", param="messages")
    changed = {**message, "content": _text(message.get("content"), at=at)}
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise FieldRefused(f"messages.{at}.tool_calls is no list", param="messages")
        changed["tool_calls"] = [_call(call, at=at) for call in calls]
    return changed


def _text(content: object, *, at: int) -> str:
    """Parts are put together, one in a line."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FieldRefused(
            f"messages.{at}.content is neither a text nor a list of parts", param="messages"
        )
    return "\n".join(_part(part, at=at) for part in content)


def _part(part: object, *, at: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind != "text":
        raise UnsupportedInput(
            f"messages.{at} has a part of type {str(kind)[:40]!r}; this server takes text alone"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise FieldRefused(f"messages.{at} has a part of type text without one", param="messages")
    return text


def _call(call: object, *, at: int) -> Json:
    """Clients send a call's arguments as JSON in a text; templates write them out themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise FieldRefused(f"messages.{at} has a tool call without a function", param="messages")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError as error:
        raise FieldRefused(
            f"messages.{at} has a tool call whose arguments are not JSON: {error}",
            param="messages",
        ) from error
    return {**call, "function": {**function, "arguments": parsed}}
