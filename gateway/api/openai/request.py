"""From a body to the message for the engine, for one prompt."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.api.openai.bodies import Body
from gateway.api.openai.choice import TextRules
from gateway.api.openai.errors import FieldRefused
from gateway.api.openai.structured import structured_output
from gateway.api.openai.tokenizer import ModelTokenizer
from tandem.errors import EmptyBatch, TokenOutOfVocabulary
from tandem.v1 import sampler_pb2

_MOST_STOPS = 64
_LONGEST_STOP = 1024


@dataclass(frozen=True)
class Stops:
    """What ends a sample. OpenAI's stop strings are beside the model's end tokens, not in their
    place."""

    strings: Sequence[str]
    tokens: Sequence[int]


def stops_of(body: Body, tokenizer: ModelTokenizer) -> Stops:
    """Raises `FieldRefused`."""
    strings = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(strings) > _MOST_STOPS or any(not 0 < len(s) <= _LONGEST_STOP for s in strings):
        raise FieldRefused(
            f"stop takes up to {_MOST_STOPS} strings of 1 to {_LONGEST_STOP} characters",
            param="stop",
        )
    tokens = list(body.stop_token_ids or [])
    if any(not 0 <= token < 2**31 for token in tokens):
        raise FieldRefused(
            "stop_token_ids holds a number that is no token id", param="stop_token_ids"
        )
    ends = [] if body.ignore_eos else [t for t in tokenizer.end_tokens if t not in tokens]
    return Stops(strings=strings, tokens=[*tokens, *ends])


def rules_of(body: Body, stops: Stops) -> TextRules:
    return TextRules(
        stops=stops.strings,
        stop_tokens=frozenset(stops.tokens),
        skip_special_tokens=body.skip_special_tokens,
        keep_stop=body.include_stop_str_in_output,
    )


def sample_request(
    body: Body,
    *,
    prompt: Sequence[int],
    stops: Stops,
    max_tokens: int | None,
    top_logprobs: int,
    prompt_logprobs: bool,
) -> sampler_pb2.SampleRequest:
    """All but the place in a sampling session. `max_tokens` None: as many as fit. Raises
    `FieldRefused`, `EmptyBatch` or `TokenOutOfVocabulary`."""
    return sampler_pb2.SampleRequest(
        prompt_tokens=_int32(prompt),
        num_samples=body.n or 1,
        prompt_logprobs=prompt_logprobs,
        topk_prompt_logprobs=top_logprobs if prompt_logprobs else 0,
        topk_sample_logprobs=top_logprobs,
        params=sampler_pb2.SamplingParams(
            max_tokens=max_tokens,
            seed=body.seed,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=body.top_k or -1,
            top_p=1.0 if body.top_p is None else body.top_p,
            stop_given=True,
            stop_strings=stops.strings,
            stop_token_ids=stops.tokens,
        ),
        structured=structured_output(
            response_format=body.response_format,
            structured_outputs=body.structured_outputs,
            guided_json=body.guided_json,
            guided_regex=body.guided_regex,
            guided_choice=body.guided_choice,
        ),
    )


def _int32(tokens: Sequence[int]) -> bytes:
    """Little endian, as all machines that vLLM runs on have it."""
    if not tokens:
        raise EmptyBatch("the prompt is empty; sampling needs at least one token")
    if not all(0 <= token < 2**31 for token in (min(tokens), max(tokens))):
        raise TokenOutOfVocabulary("the prompt holds a number that is no token id")
    return array("i", tokens).tobytes()
