"""Encodes what a forward_backward computed as the client's protobuf message."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from tandem.wire.v1 import tinker_pb2 as wire
from trainer_service.batch import Batch, Float32Array


def encode_output(batch: Batch, *, logprobs: Float32Array, metrics: Mapping[str, float]) -> bytes:
    """`logprobs` [E] in the order of the batch; each datum's come in the shape of its targets.

    One record holds many datums, but its trailing shape is theirs in common, so a new record
    begins where K changes.
    """
    output = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    ends = np.cumsum(batch.sizes)
    changes = np.flatnonzero(np.diff(batch.trailing)) + 1
    bounds = [0, *changes.tolist(), len(ends)]
    for first, last in pairwise(bounds):
        start = int(ends[first - 1]) if first else 0
        offsets = np.concatenate([[0], ends[first:last] - start]).astype("<i8") * 4
        width = int(batch.trailing[first])
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=last - first)
        field = record.fields["logprobs"]
        field.data = logprobs[start : int(ends[last - 1])].astype("<f4", copy=False).tobytes()
        field.offsets = offsets.tobytes()
        field.dtype = wire.DTYPE_FLOAT32
        if width:
            field.trailing_shape.append(width)
    return output.SerializeToString()
