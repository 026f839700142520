"""Tokens into text, as they come: no half character, and nothing behind a stop string.

The same text comes out however the tokens are divided, so that a streamed answer is the one
that would not have been streamed.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.api.openai.tokenizer import ModelTokenizer

_CONTEXT = 5
"""Tokens before the new ones that are decoded with them: what a token reads like can depend on
what stands before it (a blank at the beginning, a character of several tokens)."""

_LONGEST_CHARACTER = 4
"""Bytes, and so tokens, of a character."""

_PATIENCE = 32
"""Tokens that may wait for the rest of a character. No character has as many: this is noise."""

_UNFINISHED = "\ufffd"


class Detokenizer:
    """Turns tokens into the text that they add to what stands before them. `context` are the
    last tokens before the first."""

    def __init__(
        self, tokenizer: ModelTokenizer, *, context: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special if skip_special_tokens else frozenset[int]()
        self._history: list[int] = []
        self._untold: list[int] = []
        self._before: tuple[list[int], str] = ([], "")
        self._tell([token for token in context if token not in self._skipped])

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain now."""
        new = [token for token in tokens if token not in self._skipped]
        if not new:
            return ""
        if not self._untold:  # nearly always nothing is held back, and all can go at once
            text = self._added(new)
            if _UNFINISHED not in text:
                self._tell(new)
                return text
        return "".join(self._push_one(token) for token in new)

    def finish(self) -> str:
        """What was held back, with U+FFFD for what is no whole character."""
        return self._tell_untold()

    def _push_one(self, token: int) -> str:
        self._untold.append(token)
        text = self._added(self._untold)
        if text.endswith(_UNFINISHED) and len(self._untold) < _PATIENCE:
            return ""
        return self._tell_untold()

    def _tell_untold(self) -> str:
        if not self._untold:
            return ""
        text = self._added(self._untold)
        self._tell(self._untold)
        self._untold = []
        return text

    def _added(self, new: Sequence[int]) -> str:
        tokens, before = self._before
        both = self._tokenizer.decode([*tokens, *new])
        if both.startswith(before):
            return both[len(before) :]
        return both[_common(before, both) :]  # the new tokens complete a character of the old

    def _tell(self, new: Sequence[int]) -> None:
        """Chooses what the next tokens are decoded with: it begins with a whole character."""
        self._history = [*self._history, *new][-(_CONTEXT + _LONGEST_CHARACTER) :]
        for size in range(_CONTEXT, len(self._history) + 1):
            tokens = self._history[-size:]
            text = self._tokenizer.decode(tokens)
            if not text.startswith(_UNFINISHED):
                self._before = (tokens, text)
                return
        tokens = self._history[-_CONTEXT:]
        self._before = (tokens, self._tokenizer.decode(tokens))


class StopCutter:
    """Ends a text before the first of its stop strings (behind it, with `keep`). What may be the
    beginning of one is held back until it is certain."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._keep = keep
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        self._held += text
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            # The stop string that is complete first; of several, the longest.
            end, begin = min(ends)
            self.stopped = True
            told, self._held = self._held[: end if self._keep else begin], ""
            return told
        return self._tell(len(self._held) - self._longest_beginning())

    def finish(self) -> str:
        """What was held back: it was no stop string after all."""
        return self._tell(len(self._held))

    def _tell(self, length: int) -> str:
        told, self._held = self._held[:length], self._held[length:]
        return told

    def _longest_beginning(self) -> int:
        """How many characters at the end could be the beginning of a stop string."""
        return max(
            next(
                (
                    size
                    for size in range(min(len(stop) - 1, len(self._held)), 0, -1)
                    if self._held.endswith(stop[:size])
                ),
                0,
            )
            for stop in self._stops
        )


def _common(one: str, other: str) -> int:
    """The length of the beginning that both have."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
