"""A request in progress: its samples in vLLM and their outputs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from vllm.outputs import CompletionOutput

from sampler_service.engine import (
    EngineDelta,
    EngineRequest,
    EngineResult,
    PromptScores,
    SampledTokens,
)
from sampler_service.vllm.grammars import SampleGrammar
from sampler_service.vllm.sampled_logprobs import SampledLogprobs
from tandem.errors import InternalError, StructuredOutputInvalid, TandemError

_STOPPED = "stop"
"""vLLM's finish reason."""


@dataclass(eq=False)
class PendingRequest:
    """A request in vLLM, with its samples by index.

    `followers` wait until the first sample has computed the prompt. `ids` are vLLM's. `outputs`
    belong to ended samples. `reported` counts tokens in earlier deltas. `carried_at` lists a
    sample's length at each change of weights."""

    request: EngineRequest
    unfinished: set[int]
    followers: range = range(0)
    ids: dict[int, str] = field(default_factory=dict)
    carried_at: dict[int, tuple[int, ...]] = field(default_factory=dict)
    outputs: dict[int, CompletionOutput] = field(default_factory=dict)
    grammars: dict[int, SampleGrammar] = field(default_factory=dict)
    reported: dict[int, int] = field(default_factory=dict)
    prompt: PromptScores | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0

    @property
    def leader(self) -> str:
        """vLLM's id of the first sample."""
        return self.ids[0]

    def delta(self, index: int, output: CompletionOutput) -> EngineDelta | None:
        """Return a streamed sample's new part, or None. vLLM returns its own growing lists."""
        reported = self.reported.get(index, 0)
        finished = output.finish_reason is not None
        if len(output.token_ids) == reported and not finished:
            return None
        self.reported[index] = len(output.token_ids)
        new = self._sample(output, start=reported)
        return EngineDelta(id=self.request.id, index=index, new=new, finished=finished)

    def result(self) -> EngineResult:
        request = self.request
        samples = [
            replace(self._sample(self.outputs[index]), carried_at=self.carried_at.get(index, ()))
            for index in sorted(self.outputs)
        ]
        if len(samples) == 1:
            samples *= request.num_samples
        return EngineResult(
            id=request.id,
            samples=tuple(samples),
            prompt=self.prompt,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
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

    def _sample(self, output: CompletionOutput, *, start: int = 0) -> SampledTokens:
        """Return a sample, or its part from token `start` on.

        vLLM samples at least one token, which is dropped for a request of none."""
        if not self.request.max_tokens:
            start = len(output.token_ids)
        logprobs: SampledLogprobs = output.logprobs
        return SampledTokens(
            tokens=np.asarray(output.token_ids[start:], np.int32),
            logprobs=logprobs.own(start),
            stopped=output.finish_reason == _STOPPED and self.request.max_tokens > 0,
            topk=logprobs.topk(start),
        )
