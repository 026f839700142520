"""JSON for batches and their results, for clients without the SDK.

A JSON batch becomes the SDK's protobuf message. So journal, digest and checks are the same for
both. A result is protobuf until a client asks for JSON."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Annotated, Any, Literal, TypeVar

from google.protobuf.message import Message
from pydantic import BaseModel, Field

from gateway.api.fields import Answer, VersionRunInfo
from gateway.api.request_body import FirstFault, Ints, parse_json, validate
from gateway.api.tinker.sampling import Prompt, packed_integers, prompt_tokens
from gateway.api.tinker.service import json_refused
from tandem.errors import InvalidRequest, UserError
from tandem.wire.v1 import tinker_pb2 as wire

_INTEGERS = frozenset({"target_tokens", "weight_step"})
"""Inputs of a loss that are int64 when a plain list does not say its type."""
_TYPES: Mapping[int, tuple[Literal["f", "q", "i"], Literal["float32", "int64", "int32"]]] = {
    wire.DTYPE_FLOAT32: ("f", "float32"),
    wire.DTYPE_INT64: ("q", "int64"),
    wire.DTYPE_INT32: ("i", "int32"),
}
Value = TypeVar("Value")

_EMPTY = -99999.0
"""The logprob of an empty cell."""

Numbers = Annotated[list[float], FirstFault()]
Logprobs = list[float | None]
"""null where there is no number, such as for the first token of a prompt."""


class Tensor(BaseModel):
    """A dense array. `shape` is one-dimensional by default."""

    data: Numbers
    dtype: Literal["float32", "int64"]
    shape: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(None, max_length=8)


class BatchDatum(BaseModel):
    """A plain list in `loss_fn_inputs` is int64 for `target_tokens` and `weight_step`, and float32
    otherwise."""

    model_input: Prompt
    loss_fn_inputs: dict[str, Tensor | Numbers] = Field(default_factory=dict)


class BatchAddress(BaseModel):
    model_id: str
    seq_id: int = Field(ge=1, lt=2**31)


class BatchFields(BaseModel):
    data: Annotated[list[BatchDatum], FirstFault()]
    loss_fn: str = "cross_entropy"
    loss_fn_config: dict[str, float | str] = Field(default_factory=dict)
    forward_only: bool = False


class ForwardBackward(BatchFields, BatchAddress):
    """A batch in JSON. The fields are those of the protobuf message."""


class Array(Answer):
    """A dense array, or a sparse one (CSR) as it was asked for."""

    data: list[int] | Logprobs
    dtype: Literal["float32", "int64", "int32"]
    shape: list[int]
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class ForwardBackwardResult(Answer):
    """`loss_fn_outputs` has one entry per datum."""

    type: Literal["forward_backward"] = "forward_backward"
    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, Array]]
    metrics: dict[str, float | None]


class Sequence(Answer):
    """`topk_logprobs` has pairs of token and logprob for each position. `versions` of the tokens
    are given for an in-flight sample."""

    stop_reason: Literal["stop", "length"]
    tokens: Ints
    logprobs: Logprobs | None
    topk_logprobs: list[list[tuple[int, float]]] | None
    versions: list[VersionRunInfo] | None


class SampleResult(Answer):
    type: Literal["sample"] = "sample"
    weight_version: str
    sequences: list[Sequence]
    prompt_logprobs: Logprobs | None
    topk_prompt_logprobs: list[list[tuple[int, float]]] | None
    target_prompt_logprobs: Array | None
    prompt_alt_tokens: dict[Literal["tokens", "logprobs"], Array] | None
    prompt_cache_hit_tokens: int


def read_batch(
    raw: bytes, *, most_values: int
) -> tuple[wire.ForwardBackwardRouting, bytes | None, UserError | None]:
    """Return a JSON batch's routing fields, and its protobuf bytes or why it is refused.

    Raises `MalformedPayload`, `InvalidRequest` or `PayloadTooLarge` if it names no run or number,
    and `SdkTooOld` for an old SDK's body."""
    fields = parse_json(raw, most_values=most_values)
    if isinstance(fields, dict) and "forward_backward_input" in fields:
        raise json_refused("forward_backward")
    address = validate(BatchAddress, fields)
    routing = wire.ForwardBackwardRouting(model_id=address.model_id, seq_id=address.seq_id)
    try:
        message = _message(validate(BatchFields, fields))
    except UserError as refused:
        return routing, None, refused
    message.model_id, message.seq_id = address.model_id, address.seq_id
    payload = message.SerializeToString(deterministic=True)
    return wire.ForwardBackwardRouting.FromString(payload), payload, None


def _message(batch: BatchFields) -> wire.ForwardBackwardRequest:
    message = wire.ForwardBackwardRequest(loss_fn=batch.loss_fn, forward_only=batch.forward_only)
    for name, value in batch.loss_fn_config.items():
        setattr(
            message.loss_fn_config_v2[name], "text" if isinstance(value, str) else "number", value
        )
    for one in batch.data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = prompt_tokens(one.model_input)
        for name, given in one.loss_fn_inputs.items():
            dtype: Literal["float32", "int64"] = "int64" if name in _INTEGERS else "float32"
            tensor = Tensor(data=given, dtype=dtype) if isinstance(given, list) else given
            datum.loss_fn_inputs[name].CopyFrom(_tensor(tensor, name))
    return message


def _tensor(tensor: Tensor, name: str) -> wire.Tensor:
    shape = [len(tensor.data)] if tensor.shape is None else tensor.shape
    if tensor.dtype == "float32":
        return wire.Tensor(
            dtype=wire.DTYPE_FLOAT32, shape=shape, dense=array("f", tensor.data).tobytes()
        )
    if not all(value.is_integer() for value in tensor.data):
        raise InvalidRequest(f"{name}: int64 takes whole numbers only")
    dense = packed_integers("q", map(int, tensor.data), name)
    return wire.Tensor(dtype=wire.DTYPE_INT64, shape=shape, dense=dense)


def result_in_json(body: bytes, *, of_sample: bool) -> ForwardBackwardResult | SampleResult:
    """Return a protobuf result's JSON form. NaN and infinity become null."""
    if of_sample:
        return _sample_result(wire.SampleResponse.FromString(body))
    output = wire.ForwardBackwardOutput.FromString(body)
    return ForwardBackwardResult(
        loss_fn_output_type=output.loss_fn_output_type,
        loss_fn_outputs=[row for record in output.loss_fn_outputs for row in _rows(record)],
        metrics=dict(output.metrics),
    )


def _sample_result(response: wire.SampleResponse) -> SampleResult:
    return SampleResult(
        weight_version=response.tandem_weight_version,
        sequences=[
            Sequence(
                stop_reason="length" if each.stop_reason == wire.STOP_REASON_LENGTH else "stop",
                tokens=array("i", each.tokens).tolist(),
                logprobs=_given(each, "logprobs", _floats),
                topk_logprobs=_given(each, "topk_sampled_logprobs", _topk),
                versions=[VersionRunInfo.of(run) for run in each.tandem_versions] or None,
            )
            for each in response.sequences
        ],
        prompt_logprobs=_given(response, "prompt_logprobs", _floats),
        topk_prompt_logprobs=_given(response, "topk_prompt_logprobs", _topk),
        target_prompt_logprobs=_given(response, "target_prompt_logprobs", _array),
        prompt_alt_tokens=_given(
            response,
            "prompt_alt_tokens",
            lambda others: {"tokens": _array(others.tokens), "logprobs": _array(others.logprobs)},
        ),
        prompt_cache_hit_tokens=response.prompt_cache_hit_tokens,
    )


def _given(message: Message, name: str, convert: Callable[[Any], Value]) -> Value | None:
    return convert(getattr(message, name)) if message.HasField(name) else None


def _rows(record: wire.ArrayRecord) -> Iterator[dict[str, Array]]:
    ends = {name: array("q", field.offsets) for name, field in record.fields.items()}
    for index in range(record.num_datums):
        yield {
            name: _dense(
                field.data[ends[name][index] : ends[name][index + 1]],
                field.dtype,
                [-1, *field.trailing_shape],
            )
            for name, field in record.fields.items()
        }


def _array(tensor: wire.Tensor) -> Array:
    if tensor.WhichOneof("encoding") != "sparse_csr":
        return _dense(tensor.dense, tensor.dtype, list(tensor.shape))
    sparse = tensor.sparse_csr
    found = _dense(sparse.values, tensor.dtype, list(tensor.shape))
    found.sparse_crow_indices = array("q", sparse.crow_indices).tolist()
    found.sparse_col_indices = array("q", sparse.col_indices).tolist()
    return found


def _dense(data: bytes, dtype: int, shape: list[int]) -> Array:
    """`shape` may begin with -1, which stands for the rest."""
    typecode, name = _TYPES[dtype]
    values = array(typecode, data).tolist()
    if shape[:1] == [-1]:
        shape = [len(values) // max(1, prod(shape[1:])), *shape[1:]]
    return Array(data=values, dtype=name, shape=shape)


def _floats(data: bytes) -> list[float]:
    return array("f", data).tolist()


def _topk(found: wire.TopkLogprobs) -> list[list[tuple[int, float]]]:
    pairs = list(zip(array("i", found.token_ids), array("f", found.logprobs), strict=True))
    rows = (pairs[at : at + found.k] for at in range(0, len(pairs), max(1, found.k)))
    return [[pair for pair in row if pair[1] > _EMPTY] for row in rows]
