"""Tokens into text as they arrive: whole characters only, and nothing past a stop string.

The text is the same however the tokens are divided, so that a streamed response equals the whole
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from tokenizers.decoders import DecodeStream

from gateway.api.openai.tokenizer import ModelTokenizer

_REPLACEMENT = "\ufffd"
"""What a tokenizer decodes the bytes of an incomplete character to."""

_MAX_CHARACTER = 4
"""Bytes, and so tokens, in one character."""

_MAX_HELD = 32
"""Tokens held back for the rest of a character. No character has as many: this is noise."""


class Detokenizer:
    """Decodes with the `DecodeStream` of `tokenizers`, which holds tokens back until they end a
    character. What it lacks is here: an end, a bound on what it holds back, and prompts that end
    within a character, which the sampled tokens then complete. `context` are the last tokens of
    the prompt."""

    def __init__(
        self, tokenizer: ModelTokenizer, *, context: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special if skip_special_tokens else frozenset[int]()
        self._held: list[int] = []
        known = [token for token in context if token not in self._skipped]
        whole = len(known)
        while whole and tokenizer.decode(known[:whole]).endswith(_REPLACEMENT):
            whole -= 1
        self._stream = DecodeStream(ids=known[:whole])
        self.push(known[whole:][-_MAX_CHARACTER:])

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that is certain with these tokens."""
        new = [token for token in tokens if token not in self._skipped]
        if len(new) > 1 and not self._held:  # nearly always they can be decoded at once
            stream = copy(self._stream)
            text = self._tokenizer.decode_next(stream, new)
            if text is not None and _REPLACEMENT not in text:
                self._stream = stream
                return text
        return "".join(map(self._push, new))

    def finish(self) -> str:
        """Return the text of the tokens held back, with U+FFFD for incomplete characters."""
        held, self._held = self._held, []
        self._stream = DecodeStream(ids=held)
        return self._tokenizer.decode_within_text(held)

    def _push(self, token: int) -> str:
        self._held.append(token)
        text = self._tokenizer.decode_next(self._stream, [token])
        if text is None and len(self._held) < _MAX_HELD:
            return ""
        if text is None or text == _REPLACEMENT:
            return self.finish()
        self._held = []
        return text


class StopCutter:
    """Ends a text before the first of its stop strings (with `keep`: after it), and holds back
    what may be the beginning of one."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = stops
        self._keep = keep
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Return the text that is certain with this text."""
        if self.stopped:
            return ""
        self._held += text
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:  # the stop string that ends first counts; of several, the longest
            end, begin = min(ends)
            self.stopped = True
            return self._release(end if self._keep else begin)
        return self._release(len(self._held) - max(map(self._overlap, self._stops), default=0))

    def finish(self) -> str:
        """Return what was held back."""
        return "" if self.stopped else self._release(len(self._held))

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        return released

    def _overlap(self, stop: str) -> int:
        """Return how many characters at the end may be the beginning of the stop string."""
        sizes = range(min(len(stop) - 1, len(self._held)), 0, -1)
        return next((size for size in sizes if self._held.endswith(stop[:size])), 0)
