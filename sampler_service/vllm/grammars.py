"""Precompiled grammars in vLLM's structured output.

vLLM asks a grammar object per request for a bitmask before each draw, and passes it the drawn
token. It would compile the grammar in the engine, with a tokenizer. Here it gets one from
`structured_output.py`. A complete grammar also allows the request's stop tokens. If it cannot
continue, only they are allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)

from sampler_service.structured_output import CompiledGrammar, on_one_line
from sampler_service.vllm.internals import use_grammars

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llguidance import LLMatcher
    from vllm.config import ModelConfig, StructuredOutputsConfig
    from vllm.v1.engine.llm_engine import LLMEngine

PRECOMPILED = "precompiled"
"""Replaces a regex in vLLM's parameters."""


class GrammarParameters(SamplingParams):  # type: ignore[misc]
    """vLLM's parameters without the check of a grammar, which needs a tokenizer."""

    def _validate_structured_outputs(
        self,
        model_config: ModelConfig,
        structured_outputs_config: StructuredOutputsConfig | None,
        tokenizer: object,
    ) -> None:
        structured = self.structured_outputs
        assert structured is None or structured.regex == PRECOMPILED


class SampleGrammar(StructuredOutputGrammar):  # type: ignore[misc]
    """One sample's position in its grammar.

    If it cannot continue, `error` holds the reason and vLLM ends the sample. The matcher is made at
    the first use."""

    def __init__(self, grammar: CompiledGrammar, stops: Iterable[int]) -> None:
        self.stops = frozenset(stops)
        self._grammar = grammar
        self._matcher: LLMatcher | None = None
        self._ended = False
        self.error = ""

    def _current(self) -> LLMatcher:
        if self._matcher is None:
            self._matcher = self._grammar.matcher()
        return self._matcher

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Write row `batch_index` of `bitmask` [rows, vocabulary / 32], int32."""
        import llguidance.torch

        matcher = self._current()
        llguidance.torch.fill_next_token_bitmask(matcher, bitmask, batch_index)
        row = bitmask[batch_index].numpy().view(np.uint32)
        if matcher.is_error():
            self.error = on_one_line(matcher.get_error())
        elif not row.any():
            self.error = "none of the model's tokens goes on with it"
        if self.error or matcher.is_accepting():  # after an error any token ends the sample
            for token in self.stops:
                row[token // 32] |= np.uint32(1 << token % 32)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Return False if the grammar forbids a token or can no longer be followed."""
        matcher = self._current()
        for token in tokens:
            if self.error:
                return False
            if self._ended:
                return True
            self._ended = token in self.stops and matcher.is_accepting()
            if not self._ended and not matcher.consume_token(token):
                self.error = on_one_line(matcher.get_error()) or f"token {token} does not fit"
                return False
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        count = 0 if self._ended else self._current().validate_tokens(tokens)
        return tokens[:count]

    def rollback(self, num_tokens: int) -> None:
        raise AssertionError("only speculative decoding, which the engine has not, takes them back")

    def is_terminated(self) -> bool:
        return self._ended

    def reset(self) -> None:
        self._matcher, self._ended, self.error = None, False, ""


class PrecompiledGrammars(StructuredOutputBackend):  # type: ignore[misc]
    """Hands vLLM the grammars that it would compile.

    Use: `grammars = PrecompiledGrammars.install(engine)`, then `grammars.next_is(grammar, stops)`
    before each `engine.add_request` with one."""

    @classmethod
    def install(cls, engine: LLMEngine) -> PrecompiledGrammars:
        config = engine.vllm_config
        backend = cls(
            vllm_config=config,
            tokenizer=cast("object", None),
            vocab_size=config.model_config.get_vocab_size(),
        )
        use_grammars(engine, backend)
        return backend

    def next_is(self, grammar: CompiledGrammar, stops: Iterable[int]) -> SampleGrammar:
        """Set the grammar of the next added request. It ends with one of `stops`."""
        self._next = SampleGrammar(grammar, stops)
        return self._next

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = None,
    ) -> StructuredOutputGrammar:
        """Called by vLLM in `add_request`. Some versions omit the stop tokens."""
        assert grammar_spec == PRECOMPILED
        return self._next

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        return torch.full((max_num_seqs, -(-self.vocab_size // 32)), -1, dtype=torch.int32)

    def destroy(self) -> None:
        pass
