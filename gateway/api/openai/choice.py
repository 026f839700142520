"""One choice of an answer, as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gateway.api.openai.text import Detokenizer, StopCutter
from gateway.api.openai.tokenizer import ModelTokenizer
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2

FinishReason = Literal["stop", "length"]

Alternatives = Sequence[tuple[int, float]]
"""Tokens that could have stood in a place, likeliest first, with their logprobs."""


@dataclass(frozen=True)
class Piece:
    """New tokens of one sample, one logprob for each. `alternatives`: for each token, if they
    were asked for. `finish`: set with the last."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    alternatives: Sequence[Alternatives] | None = None
    finish: FinishReason | None = None


@dataclass(frozen=True)
class TextRules:
    """How tokens become the text of a choice. `stop_tokens` end a sample and are no text."""

    stops: Sequence[str] = ()
    stop_tokens: frozenset[int] = frozenset()
    skip_special_tokens: bool = True
    keep_stop: bool = False


@dataclass(frozen=True)
class Chunk:
    """What a piece adds to a choice. `text` may be behind the tokens, never before them."""

    index: int
    text: str
    piece: Piece
    finish: FinishReason | None


class Choice:
    def __init__(
        self,
        *,
        index: int,
        tokenizer: ModelTokenizer,
        prompt: Sequence[int],
        rules: TextRules,
    ) -> None:
        self.index = index
        self.tokens = 0
        self.finished = False
        self._rules = rules
        self._detokenizer = Detokenizer(
            tokenizer, context=prompt[-16:], skip_special_tokens=rules.skip_special_tokens
        )
        self._cutter = StopCutter(rules.stops, keep=rules.keep_stop)

    def add(self, piece: Piece) -> Chunk:
        self.tokens += len(piece.tokens)
        silent = frozenset[int]() if self._rules.keep_stop else self._rules.stop_tokens
        text = self._cutter.push(
            self._detokenizer.push([token for token in piece.tokens if token not in silent])
        )
        finish = piece.finish
        if finish is not None:
            self.finished = True
            text += self._cutter.push(self._detokenizer.finish())
            text += self._cutter.finish()
            finish = "stop" if self._cutter.stopped else finish
        return Chunk(index=self.index, text=text, piece=piece, finish=finish)


def piece_of_sequence(sequence: tinker_pb2.SampledSequence) -> Piece:
    """A whole sample."""
    tokens = _ints(sequence.tokens)
    return Piece(
        tokens=tokens,
        logprobs=_floats(sequence.logprobs),
        alternatives=alternatives_of(sequence.topk_sampled_logprobs)
        if sequence.HasField("topk_sampled_logprobs")
        else None,
        finish=_finish(sequence.stop_reason),
    )


def piece_of_delta(delta: sampler_pb2.SampleDelta) -> Piece:
    return Piece(
        tokens=_ints(delta.tokens),
        logprobs=_floats(delta.logprobs),
        alternatives=alternatives_of(delta.topk) if delta.HasField("topk") else None,
        finish=_finish(delta.stop_reason) if delta.finished else None,
    )


def alternatives_of(topk: tinker_pb2.TopkLogprobs) -> list[Alternatives]:
    """From [length, k]; cells without a token are left out."""
    shape = (topk.length, topk.k)
    ids = np.frombuffer(topk.token_ids, "<i4").reshape(shape)
    logprobs = np.frombuffer(topk.logprobs, "<f4").reshape(shape)
    return [
        [(token, logprob) for token, logprob in zip(row, values, strict=True) if logprob > _EMPTY]
        for row, values in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]


_EMPTY = -99999.0


def _finish(reason: int) -> FinishReason:
    return "length" if reason == tinker_pb2.STOP_REASON_LENGTH else "stop"


def _ints(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()  # type: ignore[no-any-return]


def _floats(data: bytes) -> list[float]:
    return np.frombuffer(data, "<f4").tolist()  # type: ignore[no-any-return]
