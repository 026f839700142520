"""Prompts as token ids: the first prompt of an episode, and the tokens between two answers.

A chat template renders a whole dialogue. An episode must not be rendered again, because tokenised
text differs from the sampled tokens, and because many templates rewrite earlier turns. Qwen3's, for
example, removes their `<think>` blocks. So the text between two answers comes from a dialogue with
a marker in place of the answer: it is the text after the marker. The sampled tokens stay as they
are, thinking included, and a rewriting template is only used for the new text."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeGuard, cast

from tandem.rl.rollouts import Message, Prompt, Turn

_MARKER = "ANSWER-OF-THE-POLICY-7391"
_QUESTION: Message = {"role": "user", "content": "Question"}


class TextTokenizer(Protocol):
    """The part of a tokenizer of `transformers` that is used here."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], /) -> str: ...


Template = Callable[[Sequence[Message], Sequence[Mapping[str, object]], bool], str]
"""`template(messages, tools, add_generation_prompt)` returns the text of a dialogue."""


class Renderer:
    """Token ids of prompts and observations, for one tokenizer.

    Token ids stay as they are, and text is encoded as it is. Messages go through the tokenizer's
    chat template, or through `template`. `options` go to the tokenizer's template, for example
    `enable_thinking=False`."""

    def __init__(
        self, tokenizer: Any, *, template: Template | None = None, **options: object
    ) -> None:
        self._tokenizer: TextTokenizer = tokenizer
        self._template = template or _template_of(tokenizer, options)

    def prompt(self, prompt: Prompt, *, tools: Sequence[Mapping[str, object]] = ()) -> list[int]:
        """Return the tokens of a first prompt. The template shows `tools` to the model."""
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        if are_messages(prompt):
            return self._encode(self._template(prompt, tools, True))
        return _ids(prompt)

    def follow(self, answer: Turn, observation: Prompt) -> list[int]:
        """Return the tokens between a sampled answer and the next one.

        Messages close the answer's turn first, unless the sampled tokens did."""
        if isinstance(observation, str):
            return self._encode(observation)
        if not are_messages(observation):
            return _ids(observation)
        dialogue = [_QUESTION, {"role": "assistant", "content": _MARKER}, *observation]
        added = self._encode(self._after_marker(dialogue, True))
        return added[self._closed(answer, added) :]

    def answer(self, prompt: Prompt, text: str) -> list[int]:
        """Return the tokens of a given answer to a prompt, with an end token.

        For messages they are those of the chat template. Raises `ValueError` if its text with the
        answer does not continue its text of the prompt."""
        if are_messages(prompt):
            before = self._template(prompt, (), True)
            after = self._template([*prompt, {"role": "assistant", "content": text}], (), False)
            if not after.startswith(before):
                raise ValueError("the chat template's answer does not continue its prompt")
            if after.endswith(self._closing):  # a sampled answer ends before the last newline
                after = after.removesuffix(self._closing) + self._closing.rstrip()
            tokens = self._encode(after[len(before) :])
        else:
            tokens = self._encode(text)
        end = getattr(self._tokenizer, "eos_token_id", None)
        if end is None or (tokens and tokens[-1] in self._special):
            return tokens
        return [*tokens, int(end)]

    def text(self, answer: Turn) -> str:
        """Return an answer's text, without its end token."""
        tokens = list(answer.tokens)
        if self._has_end_token(answer):
            tokens.pop()
        return self._tokenizer.decode(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens))

    @cached_property
    def rewrites_history(self) -> bool:
        """Whether the template changes earlier turns. Then the tokens of an episode differ from
        the template's text of the same messages: they keep all thinking."""
        thought = {"role": "assistant", "content": "<think>\nThought\n</think>\n\nAnswer"}
        before = self._template([_QUESTION, thought], (), False)
        after = self._template([_QUESTION, thought, _QUESTION], (), True)
        return not after.startswith(before)

    def _after_marker(self, dialogue: Sequence[Message], add_generation_prompt: bool) -> str:
        text = self._template(dialogue, (), add_generation_prompt)
        _before, marker, after = text.rpartition(_MARKER)
        if not marker:
            raise ValueError("the chat template leaves out an assistant's content")
        return after

    @cached_property
    def _closing(self) -> str:
        """The template's text at the end of an answer, for example `<|im_end|>` and a newline."""
        return self._after_marker([_QUESTION, {"role": "assistant", "content": _MARKER}], False)

    def _closed(self, answer: Turn, added: list[int]) -> int:
        """Return how many of the `added` tokens the answer already has at its end.

        A model may end with another end token than the template's: that token stands for it."""
        if answer.stop_reason == "length" or not added:
            return 0
        if self._has_end_token(answer):
            ends = self._encode(self._closing)[:1]
            stands_for = bool(ends) and self._special.issuperset({*ends, added[0]})
            return int(stands_for or added[0] == answer.tokens[-1])
        for closing in (self._encode(self._closing), self._encode(self._closing.rstrip())):
            count = len(closing)
            if count and [*answer.tokens[-count:]] == closing == added[:count]:
                return count
        return 0

    def _has_end_token(self, answer: Turn) -> bool:
        return (
            answer.stop_reason != "length"
            and len(answer.tokens) > 0
            and answer.tokens[-1] in self._special
        )

    @cached_property
    def _special(self) -> frozenset[int]:
        """Control tokens. Tags such as `<tool_call>` are added tokens, but not control tokens."""
        added: Mapping[int, Any] = getattr(self._tokenizer, "added_tokens_decoder", {})
        marked = (number for number, token in added.items() if token.special)
        return frozenset({*getattr(self._tokenizer, "all_special_ids", ()), *marked})

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _template_of(tokenizer: Any, options: Mapping[str, object]) -> Template:
    def render(
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
    ) -> str:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template: give text instead of messages, "
                "or Renderer(template=…)"
            )
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **options,
        )
        return text

    return render


def are_messages(prompt: Prompt) -> TypeGuard[Sequence[Message]]:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _ids(prompt: Prompt) -> list[int]:
    try:
        return [operator.index(cast("int", number)) for number in prompt]
    except TypeError:
        raise ValueError("a prompt is text, a list of token ids, or a list of messages") from None
