"""Logprobs in OpenAI's two layouts. They are of all tokens of a choice, the end token and those
of a stop string included, which the text does not show."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.api.openai.choice import Alternatives, Piece
from gateway.api.openai.tokenizer import ModelTokenizer

_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class LogprobWriter:
    """`by_id`: tokens are named by their ids (`token_id:17`), so that no two look alike."""

    def __init__(self, tokenizer: ModelTokenizer, *, by_id: bool = False) -> None:
        self._tokenizer = tokenizer
        self._by_id = by_id

    def of_chat(self, piece: Piece, *, top: int) -> dict[str, object]:
        """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}], "refusal": None}`, with
        the `top` likeliest tokens of each place."""
        rows = piece.alternatives or [()] * len(piece.tokens)
        return {
            "content": [
                {
                    **self._entry(token, logprob),
                    "top_logprobs": [self._entry(*other) for other in row[:top]],
                }
                for token, logprob, row in zip(piece.tokens, piece.logprobs, rows, strict=True)
            ],
            "refusal": None,
        }

    def of_completion(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        alternatives: Sequence[Alternatives | None] | None,
        *,
        top: int,
        offset: int,
    ) -> dict[str, object]:
        """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`, where the first token
        begins `offset` characters from the beginning of the text. None: a place without a
        logprob, which is the first of a prompt."""
        texts = [self._tokenizer.token(token).text for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        rows = alternatives if alternatives is not None else [None] * len(tokens)
        return {
            "tokens": [self.name(token) for token in tokens],
            "token_logprobs": [_number(logprob) for logprob in logprobs],
            "top_logprobs": [
                self._top(token, logprob, row, top)
                for token, logprob, row in zip(tokens, logprobs, rows, strict=True)
            ]
            if top
            else None,
            "text_offset": offsets,
        }

    def name(self, token: int) -> str:
        """Literal examples: `" world"`, `"bytes:\\xe2\\x82"` for a part of a character."""
        if self._by_id:
            return f"token_id:{token}"
        found = self._tokenizer.token(token)
        if "\ufffd" not in found.text:
            return found.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found.raw)

    def _entry(self, token: int, logprob: float) -> dict[str, object]:
        return {
            "token": self.name(token),
            "logprob": _number(logprob),
            "bytes": list(self._tokenizer.token(token).raw),
        }

    def _top(
        self, token: int, logprob: float | None, row: Alternatives | None, top: int
    ) -> dict[str, float | None] | None:
        """The likeliest, and the one that was sampled, too, if it is none of them."""
        if logprob is None:
            return None
        found = {self.name(other): _number(value) for other, value in (row or ())[:top]}
        found.setdefault(self.name(token), _number(logprob))
        return found


def _number(logprob: float | None) -> float | None:
    if logprob is None:
        return None
    return logprob if math.isfinite(logprob) and logprob > _LEAST else _LEAST
