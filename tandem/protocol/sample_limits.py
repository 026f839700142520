"""A model's limits for sample requests: token ids, sequence length, size of the answer.

The sampler checks every request. The gateway does so first if it knows the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tandem.errors import (
    EmptyBatch,
    InvalidRequest,
    MalformedPayload,
    SequenceTooLong,
    TokenOutOfVocabulary,
)
from tandem.v1 import sampler_pb2

MAX_SAMPLES = 16384
MAX_ANSWER_TOKENS = 2**24
"""Tokens of all samples of a request, or 128 MiB of answer."""
MAX_TOPK = 1000
MAX_CELLS = 2**22
"""Tokens times alternatives per token, or 32 MiB of ids and logprobs."""


@dataclass(frozen=True)
class SampleLimits:
    """Limits in tokens. None means unknown.

    `max_length` counts a prompt and a sample together. It is below `model_length` if a sampler's KV
    cache or a setting limits it."""

    vocabulary: int | None
    max_length: int | None
    model_length: int | None = None

    def check_request(self, message: sampler_pb2.SampleRequest) -> int | None:
        """Return the maximum tokens per sample, or None if the length is unknown. Raises a
        `UserError`."""
        prompt = len(message.prompt_tokens) // 4
        self._check_tokens(message)
        if not 1 <= message.num_samples <= MAX_SAMPLES:
            raise InvalidRequest(
                f"num_samples is {message.num_samples}; 1 to {MAX_SAMPLES} are possible"
            )
        for name, k in (
            ("topk_sample_logprobs", message.topk_sample_logprobs),
            ("topk_prompt_logprobs", message.topk_prompt_logprobs),
        ):
            limit = min(MAX_TOPK, self.vocabulary or MAX_TOPK)
            if not 0 <= k <= limit:
                raise InvalidRequest(f"{name} is {k}; 0 to {limit} are possible")
        check_cells("topk_prompt_logprobs", prompt * message.topk_prompt_logprobs)
        max_tokens = self._max_tokens(message, prompt=prompt)
        if max_tokens is None:
            return None
        tokens = message.num_samples * max_tokens
        if tokens > MAX_ANSWER_TOKENS:
            raise InvalidRequest(
                f"{message.num_samples} samples of up to {max_tokens} tokens may come to more than "
                f"{MAX_ANSWER_TOKENS} tokens in one answer; ask for fewer, or lower max_tokens"
            )
        check_cells("topk_sample_logprobs", tokens * message.topk_sample_logprobs)
        return max_tokens

    def _check_tokens(self, message: sampler_pb2.SampleRequest) -> None:
        size = len(message.prompt_tokens)
        if size % 4:
            raise MalformedPayload(f"prompt_tokens has {size} bytes, which are not int32 tokens")
        if not size:
            raise EmptyBatch("the prompt is empty; sampling needs at least one token")
        if not all(message.params.stop_strings):
            raise InvalidRequest("a stop string is empty; use an empty list to stop nowhere")
        if self.vocabulary is None:
            return
        tokens = np.frombuffer(message.prompt_tokens, "<i4")
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < self.vocabulary:
                raise TokenOutOfVocabulary(
                    f"token {token} of the prompt is outside the vocabulary of {self.vocabulary} "
                    "tokens; encode text with the model's tokenizer"
                )
        for token in message.params.stop_token_ids:
            if not 0 <= token < self.vocabulary:
                raise TokenOutOfVocabulary(
                    f"stop token {token} is outside the vocabulary of {self.vocabulary} tokens; "
                    "encode text with the model's tokenizer"
                )

    def _max_tokens(self, message: sampler_pb2.SampleRequest, *, prompt: int) -> int | None:
        """Return the maximum tokens per sample.

        A prompt that fills the context can be scored. The SDK then asks for one token and drops it.
        """
        params = message.params
        asked = params.max_tokens if params.HasField("max_tokens") else None
        if asked is not None and asked < 0:
            raise InvalidRequest(f"max_tokens is {asked}; it is a number of tokens")
        if self.max_length is None:
            return asked
        room = self.max_length - prompt
        if room == 0 and asked in (None, 1) and scores_prompt(message):
            return 0
        needed = 1 if asked is None else asked
        if needed > room:
            raise SequenceTooLong(
                "Prompt length plus max_tokens exceeds the model's context window: "
                f"{prompt} prompt tokens + {needed} max_tokens > {self.max_length}.{self._reason}"
            )
        return room if asked is None else asked

    @property
    def _reason(self) -> str:
        if self.model_length is None or self.model_length <= (self.max_length or 0):
            return ""
        return (
            f" The model's own length is {self.model_length}; the sampler's KV cache and "
            "TANDEM_SAMPLER_MAX_MODEL_LEN bound it."
        )


def check_cells(name: str, cells: int) -> None:
    """Raise `InvalidRequest` if one answer would hold too many logprobs."""
    if cells > MAX_CELLS:
        raise InvalidRequest(
            f"{name} asks for {cells} logprobs; at most {MAX_CELLS} are possible in one request"
        )


def scores_prompt(message: sampler_pb2.SampleRequest) -> bool:
    return bool(
        message.prompt_logprobs
        or message.topk_prompt_logprobs
        or message.target_prompt_tokens
        or message.prompt_alt_tokens_k
    )
