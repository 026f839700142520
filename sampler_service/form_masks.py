"""vLLM's structured outputs with forms of ours: which tokens a sample may have next.

vLLM keeps a grammar beside each request, asks it for a bitmask of tokens before each draw, and
tells it what was drawn. It would compile the grammar itself, by a tokenizer that it must hold,
once a request is in the engine. Here it is given one that has been compiled (`form_compiler.py`).

When a form is complete, the request's stop tokens are allowed, and the end tokens are among
them (`sampling.py`); when it cannot go on, nothing else is.
"""

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

from sampler_service.form_compiler import CompiledForm, first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from vllm.config import ModelConfig, StructuredOutputsConfig
    from vllm.v1.engine.llm_engine import LLMEngine

FORM_OF_OURS = "compiled"
"""What stands in vLLM's parameters in the place of a regex."""


class FormParameters(SamplingParams):  # type: ignore[misc]
    """vLLM's parameters, without its check of a form, which it refuses for want of a tokenizer."""

    def _validate_structured_outputs(
        self,
        model_config: ModelConfig,
        structured_outputs_config: StructuredOutputsConfig | None,
        tokenizer: object,
    ) -> None:
        form = self.structured_outputs
        assert form is None or form.regex == FORM_OF_OURS


class FormGrammar(StructuredOutputGrammar):  # type: ignore[misc]
    """Where one sample stands in its form. `error` says why it cannot go on; vLLM then ends
    the sample. The matcher is made when it is needed: not all samples run at once."""

    def __init__(self, form: CompiledForm) -> None:
        self._form = form
        self._matcher: LLMatcher | None = None
        self._stops: frozenset[int] = frozenset()
        self._ended = False
        self.error = ""

    def stop_with(self, tokens: frozenset[int]) -> None:
        self._stops = tokens

    def _current(self) -> LLMatcher:
        if self._matcher is None:
            self._matcher = self._form.begin()
        return self._matcher

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Writes row `batch_index` of `bitmask` [rows, vocabulary / 32], int32."""
        import llguidance.torch

        matcher = self._current()
        llguidance.torch.fill_next_token_bitmask(matcher, bitmask, batch_index)
        row = bitmask[batch_index].numpy().view(np.uint32)
        if matcher.is_error():
            self.error = first_line(matcher.get_error())
        elif not row.any():
            self.error = "none of the model's tokens goes on with it"
        if self.error or matcher.is_accepting():  # with an error any token ends the sample
            for token in self._stops:
                row[token // 32] |= np.uint32(1 << token % 32)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """False when the form does not allow a token, or can no longer be followed."""
        matcher = self._current()
        for token in tokens:
            if self.error:
                return False
            if self._ended:
                return True
            self._ended = token in self._stops and matcher.is_accepting()
            if not self._ended and not matcher.consume_token(token):
                self.error = first_line(matcher.get_error()) or f"token {token} does not fit"
                return False
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        count = 0 if self._ended else self._current().validate_tokens(tokens)
        return tokens[:count]

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError("only speculative decoding takes tokens back")

    def is_terminated(self) -> bool:
        return self._ended

    def reset(self) -> None:
        self._matcher, self._ended, self.error = None, False, ""


class FormsBackend(StructuredOutputBackend):  # type: ignore[misc]
    """Gives vLLM the grammars that it would compile. Literal use: `forms = FormsBackend.take_over
    (engine)`, then `grammar = forms.next_is(form)` before each `engine.add_request` with a form."""

    @classmethod
    def take_over(cls, engine: LLMEngine) -> FormsBackend:
        """Becomes the backend of an engine in this process (vLLM 0.28 to 0.32)."""
        config = engine.vllm_config
        backend = cls(
            vllm_config=config,
            tokenizer=cast("object", None),
            vocab_size=config.model_config.get_vocab_size(),
        )
        manager = engine.engine_core.engine_core.structured_output_manager
        manager.backend = backend
        manager._use_async_grammar_compilation = False
        return backend

    def next_is(self, form: CompiledForm) -> FormGrammar:
        self._next = FormGrammar(form)
        return self._next

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = None,
    ) -> StructuredOutputGrammar:
        """Called within `add_request`."""
        assert grammar_spec == FORM_OF_OURS
        self._next.stop_with(frozenset(stop_token_ids or ()))
        return self._next

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        return torch.full((max_num_seqs, -(-self.vocab_size // 32)), -1, dtype=torch.int32)

    def destroy(self) -> None:
        pass
