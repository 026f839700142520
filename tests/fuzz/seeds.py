"""Bodies as the SDK itself writes them, from which the mutations begin.

Ids in them are placeholders of the length of real ones: `placed` puts real ones in.
"""

from __future__ import annotations

import numpy as np
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from tandem.wire.v1 import tinker_pb2
from tests.support.custom_losses import request_body, traced

SESSION = "s-0123456789ab"
RUN = f"{SESSION}:train:0"

_PER_TOKEN = ("weights", "mask", "logprobs", "advantages", "ref_logprobs", "sequence_ratio_mask")
_SETTINGS: dict[str, dict[str, float | str]] = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "ipo": {"beta": 0.1},
}


def protobuf_seeds(losses: list[str]) -> list[tinker_pb2.ForwardBackwardRequest]:
    """One for every loss, and some with all that a datum can have."""
    seeds = [_request([_datum(5), _datum(3)], loss) for loss in losses]
    seeds += [
        _request([_sparse_datum()], "cross_entropy"),
        _request([_spanned_datum(), _datum(4)], "importance_sampling"),
        _request([_image_datum()], "cross_entropy"),
        _request([_datum(40) for _ in range(16)], "ppo"),
        _request([_wide_datum()], "cross_entropy"),
        *[_request([_datum_of_custom_loss(), _datum_of_custom_loss()], "custom")] * 3,
    ]
    return seeds


def custom_loss_body() -> bytes:
    """What the SDK sends to create_custom_loss, of a loss with inputs of one and two dimensions."""

    def loss(logprobs, line, pair):
        return (logprobs * line.sum()).sum() + pair.sum(), {"custom/line:sum": line.sum()}

    return request_body(traced(loss, logprobs=1, line=1, pair=2), session_id=SESSION)


def _request(data: list[types.Datum], loss: str) -> tinker_pb2.ForwardBackwardRequest:
    request = types.ForwardBackwardRequest(
        model_id=RUN,
        seq_id=1,
        forward_backward_input=types.ForwardBackwardInput(
            data=data, loss_fn=loss, loss_fn_config=_SETTINGS.get(loss, {})
        ),
    )
    encoded = forward_backward_request_to_proto(request).SerializeToString()
    return tinker_pb2.ForwardBackwardRequest.FromString(encoded)


def _tensor(values: list[float] | list[int], dtype: str, shape: list[int]) -> types.TensorData:
    return types.TensorData(data=values, dtype=dtype, shape=shape)


def _datum(length: int) -> types.Datum:
    tokens = [1 + i % 60 for i in range(length)]
    inputs = {"target_tokens": _tensor(tokens, "int64", [length])}
    for name in _PER_TOKEN:
        inputs[name] = _tensor([0.5] * length, "float32", [length])
    inputs["desirable"] = _tensor([1.0], "float32", [1])
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def _wide_datum() -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={
            "target_tokens": _tensor([1, 2, 3, 4, 5, 6], "int64", [3, 2]),
            "weights": _tensor([0.5] * 6, "float32", [3, 2]),
        },
    )


def _sparse_datum() -> types.Datum:
    def sparse(data: list[float] | list[int], dtype: str) -> types.TensorData:
        return types.TensorData(
            data=data,
            dtype=dtype,
            shape=[3, 4],
            sparse_crow_indices=[0, 1, 2, 3],
            sparse_col_indices=[0, 1, 3],
        )

    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={
            "target_tokens": sparse([5, 6, 7], "int64"),
            "weights": sparse([1.0, 1.0, 0.5], "float32"),
        },
    )


def _spanned_datum() -> types.Datum:
    datum = _datum(4)
    spans = [
        types.PromptProvenanceSpan(sequence_id="a:0", offset=0, length=1),
        types.SampledProvenanceSpan(sequence_id="a:0", offset=0, length=3),
    ]
    return types.Datum(
        model_input=datum.model_input,
        loss_fn_inputs=datum.loss_fn_inputs,
        model_input_spans=spans,
        loss_fn_input_spans=spans,
    )


def _image_datum() -> types.Datum:
    image = types.ImageChunk(data=np.arange(16, dtype=np.uint8).tobytes(), format="png")
    return types.Datum(
        model_input=types.ModelInput(chunks=[image]),
        loss_fn_inputs={"target_tokens": _tensor([1], "int64", [1])},
    )


def _datum_of_custom_loss() -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={
            "target_tokens": _tensor([1, 2, 3], "int64", [3]),
            "line": _tensor([1.0, 2.0], "float32", [2]),
            "pair": types.TensorData(
                data=[1.0, 2.0],
                dtype="float32",
                shape=[2, 3],
                sparse_crow_indices=[0, 1, 2],
                sparse_col_indices=[0, 2],
            ),
        },
    )
