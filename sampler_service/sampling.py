"""From a `tandem.v1.SampleRequest` to an `EngineRequest`: everything a client may get wrong.

The meaning of `stop` is that of the Tinker protocol: nothing given means that the model's end
tokens stop, and a given list is the whole of what stops, so that an empty one stops nothing.
A stop token, and the token that completes a stop string, are part of the sample. Where a form is
given, the model's end tokens stop whatever else does: nothing else can follow a complete form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sampler_service.engine import EngineFacts, EngineRequest
from sampler_service.forms import Form, parse_form
from sampler_service.prompt_questions import (
    MAX_TOPK,
    Targets,
    check_cells,
    parse_targets,
    prompt_scoring,
)
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
"""Tokens of all samples of a request together: an answer of at most 128 MiB."""
LEAST_TEMPERATURE = 0.01
"""vLLM raises a smaller one to this, which would be another distribution than the one asked for."""


@dataclass(frozen=True)
class Question:
    """A request that can be computed, once its form is compiled, and what its answer must be laid
    out like."""

    request: EngineRequest
    prompt_logprobs: bool
    targets: Targets | None
    form: Form | None = None


def parse_request(message: sampler_pb2.SampleRequest, facts: EngineFacts) -> Question:
    """Checks a request against the model. Raises a `UserError` that says what to change.

    `prompt_tokens` are int32, little endian. An absent `max_tokens` means as many as fit.
    """
    params = message.params
    prompt = _prompt(message.prompt_tokens, facts)
    if not 1 <= message.num_samples <= MAX_SAMPLES:
        raise InvalidRequest(
            f"num_samples is {message.num_samples}; 1 to {MAX_SAMPLES} are possible"
        )
    _check_distribution(params)
    topk, widest = message.topk_sample_logprobs, min(MAX_TOPK, facts.vocabulary)
    if not 0 <= topk <= widest:
        raise InvalidRequest(f"topk_sample_logprobs is {topk}; 0 to {widest} are possible")
    max_tokens = _max_tokens(params, prompt=len(prompt), facts=facts)
    if message.num_samples * max_tokens > MAX_ANSWER_TOKENS:
        raise InvalidRequest(
            f"{message.num_samples} samples of up to {max_tokens} tokens may come to more than "
            f"{MAX_ANSWER_TOKENS} tokens in one answer; ask for fewer, or lower max_tokens"
        )
    check_cells("topk_sample_logprobs", message.num_samples * max_tokens * topk)
    stop_token_ids, stop_strings = _stops(params, facts)
    form = parse_form(message.structured)
    if form is not None:
        stop_token_ids = tuple(dict.fromkeys((*stop_token_ids, *facts.end_tokens)))
    targets = parse_targets(message.target_prompt_tokens, prompt=len(prompt), facts=facts)
    request = EngineRequest(
        id=message.operation_id,
        prompt=prompt,
        num_samples=message.num_samples,
        max_tokens=max_tokens,
        temperature=params.temperature,
        top_k=params.top_k if params.top_k > 0 else -1,
        top_p=params.top_p,
        seed=params.seed if params.HasField("seed") else None,
        stop_token_ids=stop_token_ids,
        stop_strings=stop_strings,
        topk=topk,
        scoring=prompt_scoring(message, targets, prompt=len(prompt), facts=facts),
    )
    return Question(
        request=request, prompt_logprobs=message.prompt_logprobs, targets=targets, form=form
    )


def _prompt(payload: bytes, facts: EngineFacts) -> list[int]:
    if len(payload) % 4:
        raise MalformedPayload(f"prompt_tokens has {len(payload)} bytes, which are no int32 tokens")
    tokens = np.frombuffer(payload, "<i4")
    if not len(tokens):
        raise EmptyBatch("the prompt is empty; sampling needs at least one token")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= facts.vocabulary:
        wrong = low if low < 0 else high
        raise TokenOutOfVocabulary(
            f"token {wrong} of the prompt is outside the vocabulary of {facts.vocabulary} tokens"
        )
    if len(tokens) >= facts.max_length:
        raise SequenceTooLong(
            f"the prompt has {len(tokens)} tokens; with at least one more, "
            f"the model's length is {facts.max_length}"
        )
    return tokens.tolist()  # type: ignore[no-any-return]


def _max_tokens(params: sampler_pb2.SamplingParams, *, prompt: int, facts: EngineFacts) -> int:
    room = facts.max_length - prompt
    if not params.HasField("max_tokens"):
        return room
    if params.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {params.max_tokens}; at least 1 is needed")
    if params.max_tokens > room:
        raise SequenceTooLong(
            f"{prompt} prompt tokens and max_tokens {params.max_tokens} are more than "
            f"the model's length of {facts.max_length}"
        )
    return params.max_tokens


def _check_distribution(params: sampler_pb2.SamplingParams) -> None:
    temperature = params.temperature
    if not math.isfinite(temperature) or temperature < 0:
        raise InvalidRequest(f"temperature is {temperature}; it must be a number from 0 on")
    if 0 < temperature < LEAST_TEMPERATURE:
        raise InvalidRequest(
            f"temperature is {temperature}; use 0 (greedy) or at least {LEAST_TEMPERATURE}"
        )
    if not 0 < params.top_p <= 1:  # NaN is refused, too
        raise InvalidRequest(f"top_p is {params.top_p}; it must be above 0 and at most 1")
    if params.top_k < -1:
        raise InvalidRequest(f"top_k is {params.top_k}; use -1 for all tokens, or at least 1")


def _stops(
    params: sampler_pb2.SamplingParams, facts: EngineFacts
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    if not params.stop_given:
        return facts.end_tokens, ()
    for token in params.stop_token_ids:
        if not 0 <= token < facts.vocabulary:
            raise TokenOutOfVocabulary(
                f"stop token {token} is outside the vocabulary of {facts.vocabulary} tokens"
            )
    if not all(params.stop_strings):
        raise InvalidRequest("a stop string is empty; use an empty list to stop nowhere")
    return tuple(params.stop_token_ids), tuple(params.stop_strings)
