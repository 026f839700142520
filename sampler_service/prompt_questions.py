"""What a client asks about its prompt: which positions, which other tokens, and how many.

The shapes are those of the Tinker protocol. Targets are an int64 tensor [prompt - 1, K], dense
or sparse (CSR), whose row i is about prompt token i + 1; -1 asks nothing. The answer has the
same shape and layout, and 0.0 where nothing was asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from sampler_service.engine import EngineFacts, Float32Array, Int64Array, PromptScoring
from tandem.errors import InvalidRequest, MalformedPayload, TokenOutOfVocabulary
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2 as wire

MAX_TOPK = 1000
MAX_CELLS = 2**22
"""Tokens times alternatives per token: 32 MiB of ids and logprobs in an answer."""

_DTYPES = {wire.DTYPE_INT64: "<i8", wire.DTYPE_INT32: "<i4"}


@dataclass(frozen=True)
class Targets:
    """The tensor of a question: `ids` is flat, with its layout beside it. Row i's cells stand at
    `rows == i`."""

    ids: Int64Array
    rows: Int64Array
    shape: tuple[int, int]
    crow: bytes | None = None
    columns: bytes | None = None

    @property
    def asked(self) -> Int64Array:
        """Which of the flat cells ask something."""
        return np.flatnonzero(self.ids >= 0)

    def answer(self, logprobs: Float32Array) -> wire.Tensor:
        """The tensor of the answer, from the logprobs [m] of the cells that asked."""
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


def parse_targets(payload: bytes, *, prompt: int, facts: EngineFacts) -> Targets | None:
    """The targets of a request for a prompt of so many tokens; None when it has none.

    Raises `MalformedPayload`, `InvalidRequest` or `TokenOutOfVocabulary`.
    """
    if not payload:
        return None
    try:
        tensor = wire.Tensor.FromString(payload)
    except DecodeError as error:
        raise MalformedPayload(f"target_prompt_logprobs is no tensor: {error}") from error
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
        targets = Targets(ids=ids, rows=rows, shape=(shape[0], shape[1]))
    _check_targets(targets, prompt=prompt, facts=facts)
    return targets


def _integers(data: bytes, *, dtype: str) -> Int64Array:
    if len(data) % np.dtype(dtype).itemsize:
        raise MalformedPayload(f"target_prompt_logprobs: {len(data)} bytes are no {dtype} numbers")
    return np.frombuffer(data, dtype).astype(np.int64)


def _sparse(sparse: wire.SparseCsr, *, dtype: str, shape: tuple[int, int]) -> Targets:
    ids = _integers(sparse.values, dtype=dtype)
    crow = _integers(sparse.crow_indices, dtype="<i8")
    columns = _integers(sparse.col_indices, dtype="<i8")
    ordered = len(crow) == shape[0] + 1 and bool((np.diff(crow) >= 0).all())
    if not ordered or crow[0] != 0 or crow[-1] != len(ids) or len(columns) != len(ids):
        raise MalformedPayload("target_prompt_logprobs: its sparse indices do not fit together")
    if len(columns) and (columns.min() < 0 or columns.max() >= shape[1]):
        raise MalformedPayload(f"target_prompt_logprobs: a column lies outside of {shape[1]}")
    rows = np.repeat(np.arange(shape[0], dtype=np.int64), np.diff(crow))
    return Targets(
        ids=ids,
        rows=rows,
        shape=shape,
        crow=sparse.crow_indices,
        columns=sparse.col_indices,
    )


def _check_targets(targets: Targets, *, prompt: int, facts: EngineFacts) -> None:
    ids = targets.ids
    wrong = ids[(ids < -1) | (ids >= facts.vocabulary)]
    if len(wrong):
        raise TokenOutOfVocabulary(
            f"token {wrong[0]} of target_prompt_logprobs is outside the vocabulary of "
            f"{facts.vocabulary} tokens; use -1 to ask nothing"
        )
    distinct = len(np.unique(ids[targets.asked]))
    if not distinct:
        raise InvalidRequest("target_prompt_logprobs names no token: every cell is -1")
    # The answer is as large as the question: both are bounded.
    check_cells("target_prompt_logprobs", prompt * distinct)
    check_cells("target_prompt_logprobs", len(ids))


def check_cells(name: str, cells: int) -> None:
    """Raises `InvalidRequest` when one answer would hold too many logprobs."""
    if cells > MAX_CELLS:
        raise InvalidRequest(
            f"{name} asks for {cells} logprobs; at most {MAX_CELLS} are possible in one request"
        )


def prompt_scoring(
    message: sampler_pb2.SampleRequest, targets: Targets | None, *, prompt: int, facts: EngineFacts
) -> PromptScoring | None:
    """All that a request asks about its prompt of so many tokens; None when it asks nothing.

    Raises `InvalidRequest` where a number is out of its range.
    """
    for name, k, widest in (
        ("topk_prompt_logprobs", message.topk_prompt_logprobs, min(MAX_TOPK, facts.vocabulary)),
        ("prompt_alt_tokens_k", message.prompt_alt_tokens_k, MAX_TOPK),  # with replacement
    ):
        if not 0 <= k <= widest:
            raise InvalidRequest(f"{name} is {k}; 0 to {widest} are possible")
        check_cells(name, prompt * k)
    first = 1 if message.prompt_logprobs or message.topk_prompt_logprobs else None
    if message.HasField("prompt_logprobs_last_n"):
        last = message.prompt_logprobs_last_n
        if not message.prompt_logprobs:
            raise InvalidRequest(
                "prompt_logprobs_last_n is given without prompt_logprobs, which it is about"
            )
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
        draws=message.prompt_alt_tokens_k,
        draw_temperature=message.params.temperature,
        draw_seed=(message.params.seed % 2**64 if message.params.HasField("seed") else None),
    )
    return scoring if scoring.start is not None else None
