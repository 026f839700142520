"""A model's chat template: messages to text, as Hugging Face defines it.

The template is Jinja, in a sandbox that lets it change nothing and reach no attribute that
leads out. Variables: messages, tools, documents, add_generation_prompt, the special tokens by
name (bos_token, eos_token, …), and what the request adds. Functions: raise_exception,
strftime_now; the filter tojson escapes nothing. See
https://huggingface.co/docs/transformers/chat_templating_writing.
"""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from gateway.api.openai.errors import FieldRefused
from tandem.errors import InvalidRequest, UnsupportedInput

Message = Mapping[str, object]

RESERVED = frozenset(
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
_MOST_SECONDS = 10.0
"""For one rendering; those of known models take milliseconds."""
_MOST_CHARACTERS = 16 * 2**20
_TOOL_USE = "tool_use"
_MARK = "\u2060tandem-continues-here\u2060"
_SPACED_MARK = _MARK + " "


class ChatTemplate:
    """`source` is one template, or several by name: `default`, and `tool_use` for requests with
    tools. Raises `UnsupportedInput` for what is no template."""

    def __init__(
        self, source: str | Mapping[str, str], *, special_tokens: Mapping[str, str]
    ) -> None:
        self._special_tokens = dict(special_tokens)
        sources = {"default": source} if isinstance(source, str) else source
        environment = _environment()
        try:
            self._templates = {
                name: environment.from_string(text) for name, text in sources.items()
            }
        except jinja2.TemplateError as error:
            raise UnsupportedInput(f"the model's chat template is no template: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None,
        documents: Sequence[Message] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        more: Mapping[str, object],
    ) -> str:
        """The text that the model continues. Raises `InvalidRequest` where the template refuses
        the messages, breaks on them, or comes to no end."""
        if continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1])]
        variables = {
            **self._special_tokens,
            **more,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = _bounded_text(self._chosen(with_tools=bool(tools)), variables)
        except Exception as error:  # the template is foreign code
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        return _cut_at_mark(text) if continue_final_message else text

    def _chosen(self, *, with_tools: bool) -> jinja2.Template:
        if with_tools and _TOOL_USE in self._templates:
            return self._templates[_TOOL_USE]
        if "default" not in self._templates:
            raise InvalidRequest(
                f"the model has chat templates for {', '.join(sorted(self._templates))} alone"
            )
        return self._templates["default"]


def find_template(folder: Path, tokenizer_config: Mapping[str, object]) -> str | dict[str, str]:
    """The model's template, or its templates by name; empty: it has none. The files are newer
    than the field of the tokenizer's config, and count more."""
    file = folder / "chat_template.jinja"
    named = {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if file.is_file():
        text = file.read_text(encoding="utf-8")
        return {**named, "default": text} if named else text
    legacy = folder / "chat_template.json"
    if legacy.is_file():
        content = json.loads(legacy.read_text(encoding="utf-8"))
        old = content.get("chat_template") if isinstance(content, dict) else None
        if isinstance(old, str):
            return old
    field = tokenizer_config.get("chat_template")
    if isinstance(field, str):
        return field
    if isinstance(field, list):
        return {str(one["name"]): str(one["template"]) for one in cast(list[Message], field)}
    return ""


def check_variables(more: Mapping[str, object]) -> None:
    """Raises `FieldRefused` for a variable that is the request's own."""
    for name in more:
        if name in RESERVED:
            raise FieldRefused(
                f"chat_template_kwargs.{name} is a field of its own, or not offered",
                param="chat_template_kwargs",
            )


def _marked(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        raise FieldRefused(
            "continue_final_message needs a last message with a text", param="messages"
        )
    return {**message, "content": content + _SPACED_MARK}


def _cut_at_mark(text: str) -> str:
    """The text up to the end of the last message. The blank behind the mark shows whether the
    template trims what it is given; then what the message ended with is trimmed, too."""
    found = text.rfind(_MARK)
    if found < 0:
        raise InvalidRequest(
            "the model's chat template does not show the last message as it is, so that it "
            "cannot be continued (continue_final_message)"
        )
    kept = text[:found]
    return kept if text[found:].startswith(_SPACED_MARK) else kept.rstrip()


_deadline: ContextVar[float] = ContextVar("deadline of the rendering under way")


def _bounded_text(template: jinja2.Template, variables: Mapping[str, object]) -> str:
    """What the template writes, within bounds: a loop that a model's author, or a request's
    values, made endless has an answer, too."""
    _deadline.set(time.monotonic() + _MOST_SECONDS)
    pieces, size = [], 0
    for piece in template.generate(variables):
        _check_deadline()
        pieces.append(piece)
        size += len(piece)
        if size > _MOST_CHARACTERS:
            raise jinja2.TemplateError(f"it writes more than {_MOST_CHARACTERS} characters")
    return "".join(pieces)


def _check_deadline() -> None:
    if time.monotonic() > _deadline.get():
        raise jinja2.TemplateError(f"it came to no end within {_MOST_SECONDS:g} s")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Minds the deadline where a template calls something, as macros write nothing until they
    return."""

    def call(  # as Jinja names its own parameters: no template's argument may collide with them
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
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant said, for training; here it
    is the text within."""

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
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return dt.datetime.now().strftime(form)
