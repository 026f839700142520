"""Converts what vLLM returns for the samples of a request to our deltas and results."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput

from sampler_service.engine import (
    EngineDelta,
    EngineRequest,
    EngineResult,
    Float32Array,
    PromptScores,
    SampledTokens,
    TopK,
)
from sampler_service.vllm.grammars import SampleGrammar
from sampler_service.vllm.prompt_scoring import EMPTY_LOGPROB
from tandem.errors import InternalError, StructuredOutputInvalid, TandemError

STOPPED, FAILED = "stop", "error"
"""vLLM's finish reasons."""


@dataclass
class Pending:
    """A request in progress: the indices of its unfinished samples, the outputs of finished ones,
    and how many tokens of each sample deltas have reported."""

    request: EngineRequest
    unfinished: set[int]
    outputs: dict[int, CompletionOutput] = field(default_factory=dict)
    grammars: dict[int, SampleGrammar] = field(default_factory=dict)
    reported: dict[int, int] = field(default_factory=dict)
    prompt: PromptScores | None = None
    cached_tokens: int = 0

    def delta(self, index: int, output: CompletionOutput) -> EngineDelta | None:
        """Return what is new in a sample of a streamed request, None if nothing is.

        vLLM returns its own growing lists; only the new part is copied.
        """
        reported = self.reported.get(index, 0)
        finished = output.finish_reason is not None
        if len(output.token_ids) == reported and not finished:
            return None
        self.reported[index] = len(output.token_ids)
        new = _sample_of(output, topk=self.request.topk, start=reported)
        return EngineDelta(id=self.request.id, index=index, new=new, finished=finished)

    def result(self) -> EngineResult:
        """Return the result, once all samples have ended."""
        request = self.request
        samples = [
            _sample_of(self.outputs[index], topk=request.topk) for index in sorted(self.outputs)
        ]
        if len(samples) == 1:
            samples *= request.num_samples
        return EngineResult(
            id=request.id,
            samples=tuple(samples),
            prompt=self.prompt,
            cached_tokens=self.cached_tokens,
        )

    def failed(self, index: int) -> EngineResult:
        """Return the failure of a sample that vLLM ended with an error."""
        grammar = self.grammars.get(index)
        error: TandemError = InternalError("vLLM ended a sample with an error")
        if grammar is not None and grammar.error:
            error = StructuredOutputInvalid(
                f"the grammar could not be followed to its end: {grammar.error}"
            )
        return EngineResult(id=self.request.id, samples=(), failure=error)


def _sample_of(output: CompletionOutput, *, topk: int, start: int = 0) -> SampledTokens:
    """Return a sample, or its part from token `start` on."""
    flat = output.logprobs[start:] if start else output.logprobs
    return SampledTokens(
        tokens=np.asarray(output.token_ids[start:], np.int32),
        logprobs=_first_of_each(flat, missing=np.nan),
        stopped=output.finish_reason == STOPPED,
        topk=_topk(flat, k=topk) if topk else None,
    )


def _first_of_each(flat: FlatLogprobs, *, missing: float) -> Float32Array:
    """Return the logprob [n] of each position's own token, which vLLM lists first."""
    values = np.asarray(flat.logprobs, np.float32)
    starts, ends = np.asarray(flat.start_indices), np.asarray(flat.end_indices)
    out = np.full(len(starts), missing, np.float32)
    present = ends > starts
    out[present] = values[starts[present]]
    return out


def _topk(flat: FlatLogprobs, *, k: int) -> TopK:
    """Return the k likeliest tokens [n, k] of each position that no filter excluded."""
    tokens = np.zeros((len(flat), k), np.int32)
    logprobs = np.full((len(flat), k), EMPTY_LOGPROB, np.float32)
    for row, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
        ids, values = flat.token_ids[start + 1 : end][:k], flat.logprobs[start + 1 : end][:k]
        for column, (token, value) in enumerate(zip(ids, values, strict=True)):
            if np.isfinite(value):
                tokens[row, column], logprobs[row, column] = token, value
    return TopK(token_ids=tokens, logprobs=logprobs)
