"""Reads tool calls and reasoning in sampled tokens, with vLLM's parsers.

vLLM's reasoning parsers take an answer without any mark for unfinished reasoning. Here such an
answer is content, unless the prompt ends within a reasoning."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tandem.errors import InvalidRequest, UnsupportedInput, describe, without_paths
from tandem.telemetry import get_log
from tandem.v1 import sampler_pb2

_PROMPT_END = 32
"""Tokens at a prompt's end that may open a reasoning."""
_CONTEXT = 4
_INCOMPLETE = "\ufffd"
_MOST_WAITS = 3
"""Further tokens that may complete a character of UTF-8. A model may also write no UTF-8."""

ParserMaker = Callable[[bool], Any]
"""Makes vLLM's parser of a request, with or without its reasoning parser. None without any."""


class MessageParser:
    """Parses the answers of one model. Thread-safe. vLLM's parsers are imported at the first use,
    which takes seconds."""

    def __init__(self, model: Path, end_tokens: Sequence[int]) -> None:
        self._model = model
        self._end_tokens = end_tokens
        self._class = lru_cache(maxsize=32)(_parser_class)

    @staticmethod
    def import_libraries() -> None:
        import vllm.entrypoints.openai.chat_completion.protocol
        import vllm.parser
        import vllm.reasoning
        import vllm.tokenizers
        import vllm.tool_parsers  # noqa: F401

    def open_answer(
        self, request: sampler_pb2.SampleRequest, *, plain: bool = False
    ) -> ParsedAnswer:
        """Return the parser of one of a request's samples, whose whole text is content if `plain`.
        Raises `InvalidRequest` if a parser is unknown, or does not fit the model or the tools, and
        `UnsupportedInput` for a model without a tokenizer."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        asked = request.parse

        def make(reasons: bool) -> Any:
            chosen = self._class(asked.tool_parser, asked.reasoning_parser if reasons else "")
            kwargs = chat.chat_template_kwargs or {}
            return chosen and chosen(self._tokenizer, chat.tools, chat_template_kwargs=kwargs)

        self._class(asked.tool_parser, asked.reasoning_parser)
        _ = self._tokenizer
        try:
            fields = json.loads(asked.request)
            chat = ChatCompletionRequest(model="", messages=[], **fields)
            chat = make(True).adjust_request(chat)
            chosen = (lambda _reasons: None) if plain else make
            return ParsedAnswer(chosen, chat, request, self._tokenizer, self._end_tokens)
        except Exception as error:  # a parser may raise anything
            raise InvalidRequest(
                f"tool_parser {asked.tool_parser!r} or reasoning_parser "
                f"{asked.reasoning_parser!r} does not fit the model or the tools: "
                f"{without_paths(describe(error))}"
            ) from error

    @cached_property
    def _tokenizer(self) -> Any:
        from vllm.tokenizers import get_tokenizer

        try:
            return get_tokenizer(str(self._model))
        except Exception as error:  # `transformers` raises nothing narrower
            raise UnsupportedInput(
                f"the model's tokenizer does not load: {without_paths(describe(error))}"
            ) from error


class ParsedAnswer:
    """One sample. Use either `whole`, or `push` for arriving tokens.

    Both return JSON with `reasoning`, `content` and `tool_calls`, each call with `name` and
    `arguments`. Text that vLLM's parser does not understand is content."""

    def __init__(
        self,
        make: ParserMaker,
        chat: Any,
        request: sampler_pb2.SampleRequest,
        tokenizer: Any,
        end_tokens: Sequence[int],
    ) -> None:
        self._make = make
        self._chat = chat
        self._tokenizer = tokenizer
        self._ends = {*end_tokens, *request.params.stop_token_ids}
        self._stops = tuple(request.params.stop_strings)
        reasoning = getattr(make(True), "reasoning_parser", None)
        self._start = getattr(reasoning, "reasoning_start_str", None) or ""
        self._end = getattr(reasoning, "reasoning_end_str", None) or ""
        prompt = array("i", request.prompt_tokens)[-_PROMPT_END:]
        before = self._decode(prompt)
        self._begun = bool(self._start) and before.rfind(self._start) > before.rfind(self._end)
        self._parser: Any = None
        self._decided = False
        self._context: Sequence[int] = ()
        self._ids: list[int] = []
        self._text = ""
        self._waits = 0
        self._calls: dict[int, dict[str, str]] = {}

    def whole(self, tokens: Sequence[int]) -> str:
        text = self._decode(self._without_end(tokens))
        text = text[: self._stop_in(text)]
        marked = self._start in text or (self._end in text)
        parser = self._make(self._begun or marked or not self._start)
        found: tuple[str | None, str | None, Any] = (None, text, None)
        try:
            if parser is not None:
                found = parser.parse(
                    text, self._chat, enable_auto_tools=True, model_output_token_ids=tokens
                )
        except Exception:  # noqa: BLE001 - as above
            get_log().warning("answer_not_parsed", exc_info=True)
        reasoning, content, calls = found
        return _message(
            reasoning, content, [{"name": c.name, "arguments": c.arguments} for c in calls or ()]
        )

    def push(self, tokens: Sequence[int], *, finished: bool) -> str:
        """Return the part that new tokens add to the message, "" for none. Tool calls come with the
        last tokens."""
        self._ids += self._without_end(tokens) if finished else tokens
        # At a text's beginning, some tokenizers drop a blank.
        before = self._decode(self._context)
        self._text = self._decode([*self._context, *self._ids])[len(before) :]
        if not finished and self._must_wait():
            self._waits += 1
            return ""
        self._waits = 0
        count = len(self._ids) if finished else self._before_stop(before)
        if count < len(self._ids):
            self._text = self._decode([*self._context, *self._ids[:count]])[len(before) :]
            if not count or self._text.endswith(_INCOMPLETE):
                return ""
        ids, text = self._ids[:count], self._text[: self._stop_in(self._text)]
        self._context, self._ids, self._text = (
            ids[-_CONTEXT:] or self._context,
            self._ids[count:],
            "",
        )
        if not self._decided:
            self._decided = True
            reasons = self._begun or not self._start or text.lstrip().startswith(self._start)
            self._parser = self._make(reasons)
        reasoning, content = None, text
        if self._parser is not None:
            try:
                # An empty prompt tells it that there is no reasoning.
                prompt: list[int] | None = [] if self._parser.reasoning_parser is None else None
                delta = self._parser.parse_delta(text, ids, self._chat, prompt, finished=finished)
            except Exception:  # noqa: BLE001 - as above
                get_log().warning("answer_not_parsed", exc_info=True)
                self._parser = None
            else:
                reasoning = delta and delta.reasoning
                content = delta and delta.content
                for call in (delta and delta.tool_calls) or ():
                    self._add_call(call)
        calls = [*self._calls.values()] if finished else []
        return _message(reasoning, content, calls) if content or reasoning or finished else ""

    def _add_call(self, call: Any) -> None:
        known = self._calls.setdefault(call.index, {"name": "", "arguments": ""})
        if call.function is not None:
            known["name"] += call.function.name or ""
            known["arguments"] += call.function.arguments or ""

    def _must_wait(self) -> bool:
        """Return whether the new text may end within a character or the mark of the reasoning's
        start."""
        text = self._text
        if text.endswith(_INCOMPLETE) and self._waits < _MOST_WAITS:
            return True
        begin = text.lstrip()
        undecided = not self._decided and not self._begun and bool(self._start)
        return undecided and begin != self._start and self._start.startswith(begin)

    def _before_stop(self, before: str) -> int:
        """Return the number of new tokens before the beginning of a stop string at the end."""
        text, held = self._text, 0
        for stop in self._stops:
            sizes = range(min(len(stop), len(text)), held, -1)
            held = next((size for size in sizes if text.endswith(stop[:size])), held)
        if not held:
            return len(self._ids)

        def length(count: int) -> int:
            return len(self._decode([*self._context, *self._ids[:count]]))

        most = len(before) + len(text) - held
        return max(0, bisect_right(range(len(self._ids)), most, key=length) - 1)

    def _decode(self, tokens: Sequence[int]) -> str:
        skip = self._chat.skip_special_tokens
        found: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip)
        return found

    def _without_end(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens[:-1] if tokens and tokens[-1] in self._ends else tokens

    def _stop_in(self, text: str) -> int:
        """Return the place of the first stop string, or the text's length."""
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found, default=len(text))


def _message(reasoning: str | None, content: str | None, calls: list[dict[str, str]]) -> str:
    found = {
        "reasoning": _whole(reasoning),
        "content": _whole(content),
        "tool_calls": [{name: _whole(text) for name, text in call.items()} for call in calls],
    }
    return json.dumps(found)


def _whole(text: str | None) -> str | None:
    """Replace halves of surrogate pairs, which a model may write in JSON and no client reads."""
    return text and text.encode("utf-8", "replace").decode()


def _parser_class(tool_parser: str, reasoning_parser: str) -> Any:
    from vllm.parser import ParserManager
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for name, kind, manager in (
        (tool_parser, "tool", ToolParserManager),
        (reasoning_parser, "reasoning", ReasoningParserManager),
    ):
        if name and name not in (known := manager.list_registered()):
            raise InvalidRequest(f"unknown {kind}_parser {name!r}; known: {', '.join(known)}")
    return ParserManager.get_parser(
        tool_parser_name=tool_parser or None,
        reasoning_parser_name=reasoning_parser or None,
        enable_auto_tools=True,
    )
