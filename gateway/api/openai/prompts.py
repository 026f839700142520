"""Converts a request into token ids, stop conditions and sampling parameters for an engine."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from gateway.api.errors import InvalidParameter
from gateway.api.openai.parsing import forced_form
from gateway.api.openai.schemas import (
    MAX_PROMPTS,
    ChatCompletionRequest,
    InferenceRequest,
    PlainFormat,
    SchemaFormat,
)
from gateway.api.openai.tokenizer import ModelTokenizer, offsets_of
from tandem.errors import EmptyBatch, TokenOutOfVocabulary
from tandem.v1 import sampler_pb2

_MAX_STOPS = 64
_MAX_STOP_CHARACTERS = 1024
_MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True)
class PreparedPrompt:
    """`text`, and the `offsets` of tokens in it, are set if the answer shows them."""

    token_ids: Sequence[int]
    text: str | None = None
    offsets: Sequence[int] = ()


def prompts_of(
    request: InferenceRequest, tokenizer: ModelTokenizer, *, max_length: int | None
) -> list[PreparedPrompt]:
    """Return a request's prompts. A chat has one. `max_length` is the model's, in tokens. Raises
    `InvalidRequest` or a subclass, or `SequenceTooLong`."""
    if isinstance(request, ChatCompletionRequest):
        # The template writes special tokens, unless the request says otherwise.
        special = bool(request.add_special_tokens)
        given: Sequence[str | Sequence[int]] = [tokenizer.chat_template().render(request)]
    else:
        special = request.add_special_tokens is not False
        prompt = request.prompt
        single = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        given = cast(Sequence[str | Sequence[int]], [prompt] if single else prompt)
        if not 0 < len(given) <= MAX_PROMPTS:
            raise InvalidParameter(
                f"prompt holds {len(given)} prompts; 1 to {MAX_PROMPTS} are possible",
                param="prompt",
            )
    prompts = []
    for one in given:
        if isinstance(one, str):
            ids = tokenizer.encode(one, add_special_tokens=special, max_length=max_length)
            prompts.append(PreparedPrompt(ids, text=one))
        else:
            prompts.append(PreparedPrompt(one))
    return (
        [_echoed(one, tokenizer, special=special) for one in prompts] if request.echo else prompts
    )


def _echoed(prompt: PreparedPrompt, tokenizer: ModelTokenizer, *, special: bool) -> PreparedPrompt:
    if prompt.text is not None:
        offsets = tokenizer.offsets(prompt.text, add_special_tokens=special)
        return replace(prompt, offsets=offsets)
    text = tokenizer.decode(prompt.token_ids)
    return replace(prompt, text=text, offsets=offsets_of(prompt.token_ids, tokenizer, text))


def sampling_params(
    request: InferenceRequest, tokenizer: ModelTokenizer
) -> sampler_pb2.SamplingParams:
    """Return the engine's parameters, with the model's end tokens as stop tokens. Raises
    `InvalidParameter` for wrong stop strings."""
    strings = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(strings) > _MAX_STOPS or any(not 0 < len(s) <= _MAX_STOP_CHARACTERS for s in strings):
        raise InvalidParameter(
            f"stop takes up to {_MAX_STOPS} strings of 1 to {_MAX_STOP_CHARACTERS} characters",
            param="stop",
        )
    tokens = request.stop_token_ids or []
    ends = [] if request.ignore_eos else [t for t in tokenizer.end_tokens if t not in tokens]
    return sampler_pb2.SamplingParams(
        max_tokens=request.max_tokens,
        seed=request.seed,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=request.top_k or -1,
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        stop_given=True,
        stop_strings=strings,
        stop_token_ids=[*tokens, *ends],
    )


def make_sample_request(
    request: InferenceRequest,
    *,
    prompt: PreparedPrompt,
    params: sampler_pb2.SamplingParams,
    parse: sampler_pb2.MessageParsing | None = None,
) -> sampler_pb2.SampleRequest:
    """Return the engine's request for one prompt, without its sampling session. Raises
    `InvalidParameter`, `EmptyBatch` or `TokenOutOfVocabulary`."""
    top = request.alternatives or 0
    scores_prompt = bool(request.echo) and request.alternatives is not None
    return sampler_pb2.SampleRequest(
        prompt_tokens=_int32(prompt.token_ids),
        num_samples=request.n or 1,
        prompt_logprobs=scores_prompt,
        topk_prompt_logprobs=top if scores_prompt else 0,
        topk_sample_logprobs=top,
        params=params,
        structured=structured_output(request),
        in_flight=request.in_flight,
        parse=parse,
    )


def _int32(tokens: Sequence[int]) -> bytes:
    """Encode as little-endian int32, the byte order of all machines for vLLM."""
    if not tokens:
        raise EmptyBatch("the prompt is empty; sampling needs at least one token")
    if min(tokens) < 0 or max(tokens) > _MAX_TOKEN_ID:
        raise TokenOutOfVocabulary("the prompt holds a number that is not a token id")
    return array("i", tokens).tobytes()


# --- Structured output ---------------------------------------------------------------------


def structured_output(request: InferenceRequest) -> sampler_pb2.StructuredOutput | None:
    """Return the required form of samples, from OpenAI's `response_format` or vLLM's fields, None
    for free text. The sampler checks the form. Raises `InvalidParameter`."""
    asked: list[tuple[str, str, object]] = []
    match request.response_format:
        case SchemaFormat(json_schema=described):
            asked.append(("response_format", "json", described.schema_))
        case PlainFormat(type="json_object"):
            asked.append(("response_format", "json_object", True))
    for kind in ("json", "regex", "choice", "grammar"):
        value: object = getattr(request, f"guided_{kind}")
        if value is not None:
            asked.append((f"guided_{kind}", kind, value))
    if isinstance(request, ChatCompletionRequest) and (form := forced_form(request)) is not None:
        asked.append(("tool_choice", "json", form))
    if (given := request.structured_outputs) is not None:
        for kind, value in given.model_dump(by_alias=True, exclude_none=True).items():
            asked.append((f"structured_outputs.{kind}", kind, value))
    if len(asked) > 1:
        names = " and ".join(param for param, _kind, _value in asked)
        raise InvalidParameter(f"a sample can have one form; given: {names}", param=asked[1][0])
    return _structure(*asked[0][1:]) if asked else None


def _structure(kind: str, value: Any) -> sampler_pb2.StructuredOutput:
    match kind:
        case "json":
            schema = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            return sampler_pb2.StructuredOutput(json_schema=schema)
        case "choice":
            choices = sampler_pb2.StructuredOutput.Choices(choices=value)
            return sampler_pb2.StructuredOutput(choice=choices)
        case "grammar":
            return sampler_pb2.StructuredOutput(lark=value)
        case _:
            return sampler_pb2.StructuredOutput(**{kind: value})
