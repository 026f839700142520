"""Parses and checks a `tandem.v1.SampleRequest`, with the semantics of the Tinker protocol.

Without `stop`, the model's end tokens stop a sample. A `stop` list replaces them. The sample
includes its stop token, or the token that completes a stop string. With structured output, the end
tokens always stop.

`target_prompt_tokens` is an int64 tensor [prompt - 1, K] of token ids, dense or sparse (CSR). Its
row i is about prompt token i + 1, and -1 leaves a cell out. The answer has this shape and layout,
with 0.0 in such cells."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from sampler_service.engine import (
    EngineFacts,
    EngineRequest,
    Float32Array,
    Int64Array,
    PromptScoring,
)
from sampler_service.structured_output import Grammar, parse_structured_output
from tandem.errors import InvalidRequest, MalformedPayload, TokenOutOfVocabulary
from tandem.protocol.sample_limits import MAX_TOPK, SampleLimits, check_cells
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2 as wire

MIN_TEMPERATURE = 0.01
"""The smallest temperature except 0. Below it, logits overflow."""
MAX_PENALTY = 2.0

_DTYPES = {wire.DTYPE_INT64: "<i8", wire.DTYPE_INT32: "<i4"}


@dataclass(frozen=True)
class ParsedRequest:
    """A request for the engine, its uncompiled grammar, and the options of its response."""

    request: EngineRequest
    prompt_logprobs: bool
    targets: TargetTensor | None
    grammar: Grammar | None = None


def parse_request(message: sampler_pb2.SampleRequest, facts: EngineFacts) -> ParsedRequest:
    """Check a request against the model. Raises a `UserError` that names the remedy."""
    limits = SampleLimits(
        vocabulary=facts.vocabulary,
        max_length=facts.max_length,
        model_length=facts.model_length,
    )
    max_tokens = limits.check_request(message)
    assert max_tokens is not None, "an engine has a length"
    params = message.params
    prompt: list[int] = np.frombuffer(message.prompt_tokens, "<i4").tolist()
    temperature = _temperature(params)
    stop_token_ids = tuple(params.stop_token_ids) if params.stop_given else facts.end_tokens
    grammar = parse_structured_output(message.structured)
    if grammar is not None:
        stop_token_ids = tuple(dict.fromkeys((*stop_token_ids, *facts.end_tokens)))
    targets = parse_targets(message.target_prompt_tokens, prompt=len(prompt), facts=facts)
    request = EngineRequest(
        id=message.operation_id,
        prompt=prompt,
        num_samples=message.num_samples,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=params.top_k if params.top_k > 0 else -1,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed if params.HasField("seed") else None,
        stop_token_ids=stop_token_ids,
        stop_strings=tuple(params.stop_strings),
        topk=message.topk_sample_logprobs,
        scoring=_prompt_scoring(message, targets, prompt=len(prompt), temperature=temperature),
    )
    return ParsedRequest(
        request=request, prompt_logprobs=message.prompt_logprobs, targets=targets, grammar=grammar
    )


def _temperature(params: sampler_pb2.SamplingParams) -> float:
    """Return the temperature, with a check of filters and penalties too."""
    temperature = params.temperature
    if not math.isfinite(temperature) or temperature < 0:
        raise InvalidRequest(f"temperature is {temperature}; it must be a number of at least 0")
    if not 0 < params.top_p <= 1:  # also refuses NaN
        raise InvalidRequest(f"top_p is {params.top_p}; it must be above 0 and at most 1")
    if params.top_k < -1:
        raise InvalidRequest(f"top_k is {params.top_k}; use -1 for all tokens, or at least 1")
    if not 0 <= params.min_p <= 1:
        raise InvalidRequest(f"min_p is {params.min_p}; it must be from 0 to 1")
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(params, name)
        if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            raise InvalidRequest(f"{name} is {penalty}; it must be from -2 to 2")
    return max(temperature, MIN_TEMPERATURE) if temperature else 0.0


# --- Scores of the prompt ----------------------------------------------------------------


@dataclass(frozen=True)
class TargetTensor:
    """Token ids to score in place of the prompt's.

    `ids` and `rows` are flat: cell j holds `ids[j]` in row `rows[j]`. A sparse tensor keeps its
    indices, `crow` and `columns`."""

    ids: Int64Array
    rows: Int64Array
    shape: tuple[int, int]
    crow: bytes | None = None
    columns: bytes | None = None

    @property
    def asked(self) -> Int64Array:
        """The indices of flat cells with a token."""
        return np.flatnonzero(self.ids >= 0)

    def answer(self, logprobs: Float32Array) -> wire.Tensor:
        """Return a tensor of this layout with the logprobs [m] of the `asked` cells."""
        values = np.zeros(len(self.ids), "<f4")
        values[self.asked] = logprobs
        tensor = wire.Tensor(dtype=wire.DTYPE_FLOAT32, shape=self.shape)
        if self.crow is None:
            tensor.dense = values.tobytes()
        else:
            tensor.sparse_csr.values = values.tobytes()
            tensor.sparse_csr.crow_indices = self.crow
            tensor.sparse_csr.col_indices = self.columns or b""
        return tensor


def parse_targets(payload: bytes, *, prompt: int, facts: EngineFacts) -> TargetTensor | None:
    """Return the targets for a prompt of `prompt` tokens, or None.

    Raises `MalformedPayload`, `InvalidRequest` or `TokenOutOfVocabulary`."""
    if not payload:
        return None
    try:
        tensor = wire.Tensor.FromString(payload)
    except DecodeError as error:
        raise MalformedPayload(f"target_prompt_logprobs is not a tensor: {error}") from error
    if tensor.dtype not in _DTYPES:
        raise InvalidRequest("target_prompt_logprobs must be an int64 tensor of token ids")
    shape = tuple(tensor.shape)
    if len(shape) != 2 or shape[0] != prompt - 1 or shape[1] < 1:
        raise InvalidRequest(
            f"target_prompt_logprobs has the shape {list(shape)}; for a prompt of {prompt} "
            f"tokens it must be [{prompt - 1}, K] with K at least 1"
        )
    dtype = _DTYPES[tensor.dtype]
    if tensor.WhichOneof("encoding") == "sparse_csr":
        targets = _sparse(tensor.sparse_csr, dtype=dtype, shape=(shape[0], shape[1]))
    else:
        ids = _integers(tensor.dense, dtype=dtype)
        if len(ids) != shape[0] * shape[1]:
            raise MalformedPayload(
                f"target_prompt_logprobs has {len(ids)} ids, not {shape[0]} x {shape[1]}"
            )
        rows = np.repeat(np.arange(shape[0], dtype=np.int64), shape[1])
        targets = TargetTensor(ids=ids, rows=rows, shape=(shape[0], shape[1]))
    _check_targets(targets, prompt=prompt, facts=facts)
    return targets


def _integers(data: bytes, *, dtype: str) -> Int64Array:
    if len(data) % np.dtype(dtype).itemsize:
        raise MalformedPayload(f"target_prompt_logprobs: {len(data)} bytes are not {dtype} numbers")
    return np.frombuffer(data, dtype).astype(np.int64)


def _sparse(sparse: wire.SparseCsr, *, dtype: str, shape: tuple[int, int]) -> TargetTensor:
    ids = _integers(sparse.values, dtype=dtype)
    crow = _integers(sparse.crow_indices, dtype="<i8")
    columns = _integers(sparse.col_indices, dtype="<i8")
    ordered = len(crow) == shape[0] + 1 and bool((np.diff(crow) >= 0).all())
    if not ordered or crow[0] != 0 or crow[-1] != len(ids) or len(columns) != len(ids):
        raise MalformedPayload("target_prompt_logprobs: the sparse indices are inconsistent")
    if len(columns) and (columns.min() < 0 or columns.max() >= shape[1]):
        raise MalformedPayload(f"target_prompt_logprobs: a column is not in 0 to {shape[1] - 1}")
    rows = np.repeat(np.arange(shape[0], dtype=np.int64), np.diff(crow))
    return TargetTensor(
        ids=ids,
        rows=rows,
        shape=shape,
        crow=sparse.crow_indices,
        columns=sparse.col_indices,
    )


def _check_targets(targets: TargetTensor, *, prompt: int, facts: EngineFacts) -> None:
    ids = targets.ids
    wrong = ids[(ids < -1) | (ids >= facts.vocabulary)]
    if len(wrong):
        raise TokenOutOfVocabulary(
            f"token {wrong[0]} of target_prompt_logprobs is outside the vocabulary of "
            f"{facts.vocabulary} tokens; use -1 to leave a cell out"
        )
    distinct = len(np.unique(ids[targets.asked]))
    if not distinct:
        raise InvalidRequest("target_prompt_logprobs names no token: every cell is -1")
    # Limit the size of the answer, with and without empty cells.
    check_cells("target_prompt_logprobs", prompt * distinct)
    check_cells("target_prompt_logprobs", len(ids))


def _prompt_scoring(
    message: sampler_pb2.SampleRequest,
    targets: TargetTensor | None,
    *,
    prompt: int,
    temperature: float,
) -> PromptScoring | None:
    """Return the requested scores of the prompt, or None. Raises `InvalidRequest`."""
    draws = message.prompt_alt_tokens_k
    if not 0 <= draws <= MAX_TOPK:
        raise InvalidRequest(f"prompt_alt_tokens_k is {draws}; 0 to {MAX_TOPK} are possible")
    check_cells("prompt_alt_tokens_k", prompt * draws)
    first = 1 if message.prompt_logprobs or message.topk_prompt_logprobs else None
    if message.HasField("prompt_logprobs_last_n"):
        last = message.prompt_logprobs_last_n
        if not message.prompt_logprobs:
            raise InvalidRequest("prompt_logprobs_last_n needs prompt_logprobs")
        if not 1 <= last <= prompt - 1:
            raise InvalidRequest(
                f"prompt_logprobs_last_n is {last}; for a prompt of {prompt} tokens "
                f"1 to {prompt - 1} are possible"
            )
        first = prompt - last
    asked = targets.asked if targets is not None else np.zeros(0, np.int64)
    scoring = PromptScoring(
        first=first,
        topk=message.topk_prompt_logprobs,
        target_positions=targets.rows[asked] + 1 if targets is not None else asked,
        target_ids=targets.ids[asked] if targets is not None else asked,
        draws=draws,
        draw_temperature=temperature,
        draw_seed=(message.params.seed % 2**64 if message.params.HasField("seed") else None),
    )
    return scoring if scoring.first_computed is not None else None
