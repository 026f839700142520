"""A model's chat template, which turns messages into text as Hugging Face defines it.

The template is Jinja, in a read-only sandbox with bounded time and output. Variables: messages,
tools, documents, add_generation_prompt, the special tokens by name (bos_token, eos_token, …), and
the request's. Functions: raise_exception, strftime_now. The filter tojson escapes nothing. See
https://huggingface.co/docs/transformers/chat_templating_writing.

`transformers` has no such bounds, and its import takes seconds and hundreds of megabytes. A test
compares the two."""

from __future__ import annotations

import datetime as dt
import json
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.sandbox
import orjson
from jinja2 import nodes
from jinja2.parser import Parser

from gateway.api.errors import InvalidParameter
from gateway.api.openai.schemas import ChatCompletionRequest, Json
from tandem.errors import InvalidRequest, UnsupportedInput, describe
from tandem.weights.model_config import read_json

_OWN_FIELDS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
    }
)
"""Variables that `chat_template_kwargs` may not set."""

_EMPTY: tuple[object, ...] = (None, "", [], {})
"""Empty values of a message's fields, which clients send for absent ones."""

_MARK = "\u2060tandem-continues-here\u2060"
_SPACED_MARK = _MARK + " "


class ChatTemplate:
    """`source` is one template, or several by name: `default`, and `tool_use` for requests with
    tools. A rendering is bounded by `max_seconds` and `max_characters`. Raises `UnsupportedInput`
    for an invalid template."""

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str],
        max_seconds: float = 10.0,
        max_characters: int = 16 * 2**20,
    ) -> None:
        self._max_seconds = max_seconds
        self._max_characters = max_characters
        self._special_tokens = dict(special_tokens)
        sources = {"default": source} if isinstance(source, str) else source
        environment = _environment()
        try:
            self._templates = {
                name: environment.from_string(text) for name, text in sources.items()
            }
        except jinja2.TemplateError as error:
            raise UnsupportedInput(f"the model's chat template is invalid: {error}") from error

    def render(self, request: ChatCompletionRequest) -> str:
        """Return the text for the model to continue. Raises `InvalidRequest` or a subclass if a
        message or the template fails, or a bound is exceeded."""
        messages = [_message(message, at=index) for index, message in enumerate(request.messages)]
        if not request.continue_final_message:
            return self._render(request, messages)
        messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{_SPACED_MARK}"}
        return _cut_at_mark(self._render(request, messages))

    def render_after(self, request: ChatCompletionRequest, *, answer: int) -> str | None:
        """Return the part of the text after the content of an assistant's message, which ends its
        turn. The content itself does not matter. Return None if the template hides or needs it.
        Raises as `render`."""
        messages = [_message(message, at=index) for index, message in enumerate(request.messages)]
        sign = f"\u2060{secrets.token_hex(8)}\u2060"  # no message has it
        messages[answer] = {"role": "assistant", "content": sign}
        try:
            text = self._render(request, messages)
        except InvalidRequest:  # such as a template that wants a call before each tool's result
            return None
        _before, found, after = text.partition(sign)
        return after if found else None

    def _render(self, request: ChatCompletionRequest, messages: list[Json]) -> str:
        given = request.chat_template_kwargs or {}
        if own := _OWN_FIELDS & given.keys():
            raise InvalidParameter(
                f"chat_template_kwargs.{min(own)} is not allowed; use the field {min(own)} of the "
                "request if there is one, or leave it out",
                param="chat_template_kwargs",
            )
        tools = request.shown_tools
        variables = {
            **self._special_tokens,
            **given,
            "messages": messages,
            "tools": tools,
            "documents": request.documents or None,
            "add_generation_prompt": request.add_generation_prompt,
        }
        try:
            return self._bounded_text(self._choose(with_tools=bool(tools)), variables)
        except Exception as error:  # a template can raise anything
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {describe(error)}"
            ) from error

    def _choose(self, *, with_tools: bool) -> jinja2.Template:
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(
                f"the model only has chat templates for {', '.join(sorted(self._templates))}"
            )
        return self._templates[name]

    def _bounded_text(self, template: jinja2.Template, variables: Mapping[str, object]) -> str:
        """Render the template within its bounds, because its loop may be endless."""
        _deadline.set((time.monotonic() + self._max_seconds, self._max_seconds))
        pieces, size = [], 0
        for piece in template.generate(variables):
            _check_deadline()
            pieces.append(piece)
            size += len(piece)
            if size > self._max_characters:
                raise jinja2.TemplateError(f"it writes more than {self._max_characters} characters")
        return "".join(pieces)


def find_template(folder: Path, tokenizer_config: Mapping[str, object]) -> str | dict[str, str]:
    """Return the model's template, its templates by name, or "". Files take precedence over the
    older field in the tokenizer's config."""
    file = folder / "chat_template.jinja"
    named = {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if file.is_file():
        text = file.read_text(encoding="utf-8")
        return {**named, "default": text} if named else text
    legacy = read_json(folder / "chat_template.json").get("chat_template")
    field = legacy or tokenizer_config.get("chat_template") or ""
    if isinstance(field, list):
        return {str(one["name"]): str(one["template"]) for one in cast(list[Json], field)}
    return str(field)


def _message(message: Json, *, at: int) -> Json:
    """Return a message for templates: text content, tool arguments as objects, and no empty
    fields."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong_message(at, "has no role")
    # Templates test for the presence of fields.
    known = {name: value for name, value in message.items() if value not in _EMPTY}
    known["content"] = _text(message.get("content"), at=at)
    calls = known.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise _wrong_message(at, "has tool_calls that are not a list")
        known["tool_calls"] = [_tool_call(call, at=at) for call in calls]
    return known


def _text(content: object, *, at: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _wrong_message(at, "has a content that is neither a text nor a list of parts")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        is_text = kind in ("text", "refusal")
        text = part.get(kind) or "" if is_text else part
        if not isinstance(text, str):
            if is_text:
                raise _wrong_message(at, f"has a {kind} part without text")
            raise UnsupportedInput(
                f"messages.{at} has a part of type {str(kind)[:40]!r}; this server takes only text"
            )
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: object, *, at: int) -> Json:
    """Parse a tool call's arguments, because templates need objects. Invalid JSON stays text, as a
    model may have written it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise _wrong_message(at, "has a tool call without a function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(orjson.JSONDecodeError):
            arguments = orjson.loads(arguments)
    present = {name: value for name, value in call.items() if value is not None}
    return {**present, "function": {**function, "arguments": arguments}}


def _wrong_message(at: int, what: str) -> InvalidParameter:
    return InvalidParameter(f"messages.{at} {what}", param="messages")


def _cut_at_mark(text: str) -> str:
    """Cut the text after the last message, as `transformers` does, trimmed if the template trims
    the mark."""
    found = text.rfind(_MARK)
    if found < 0:
        raise InvalidRequest(
            "the model's chat template does not show the last message as it is, so it cannot be "
            "continued (continue_final_message)"
        )
    kept = text[:found]
    return kept if text[found:].startswith(_SPACED_MARK) else kept.rstrip()


_deadline: ContextVar[tuple[float, float]] = ContextVar("deadline")
"""The current rendering's monotonic deadline, and its seconds."""


def _check_deadline() -> None:
    deadline, seconds = _deadline.get()
    if time.monotonic() > deadline:
        raise jinja2.TemplateError(f"it came to no end within {seconds:g} s")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Also checks the deadline at every call, because macros write only at their end."""

    def call(  # as in Jinja: no template's argument may collide with these names
        __self,
        __context: jinja2.runtime.Context,
        __obj: object,
        *args: object,
        **kwargs: object,
    ) -> object:
        _check_deadline()
        return super().call(__context, __obj, *args, **kwargs)


def _environment() -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: dt.datetime.now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """Renders `{% generation %}…{% endgeneration %}`, which marks training text, as its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
