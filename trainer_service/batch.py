"""A batch as flat arrays, and how it comes out of the client's protobuf message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from tandem.errors import LossInputShape, MalformedPayload
from tandem.wire.v1 import tinker_pb2 as wire
from trainer_service.losses.base import Loss, Settings
from trainer_service.losses.layout import Totals

Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]

_NUMPY_TYPES: dict[int, np.dtype[np.generic]] = {
    wire.DTYPE_FLOAT32: np.dtype("<f4"),
    wire.DTYPE_INT64: np.dtype("<i8"),
    wire.DTYPE_INT32: np.dtype("<i4"),
    wire.DTYPE_BFLOAT16: np.dtype("<u2"),
}
INTEGER_TYPES = frozenset({wire.DTYPE_INT64, wire.DTYPE_INT32})
FLOAT_TYPES = frozenset({wire.DTYPE_FLOAT32, wire.DTYPE_BFLOAT16})


@dataclass(frozen=True)
class Batch:
    """n datums, all datums' values one after the other.

    `tokens` [Σ lengths], `lengths` [n]: the model input. `targets` [E] and each of `inputs` [E]
    hold a datum's [N] or [N, K] values row by row, E = Σ lengths·widths, where `widths` [n] is
    K; `trailing` [n] is the K that the client gave, or 0 for targets of one dimension.
    `sequences` [E] numbers the sampled sequences of the batch, -1 for tokens of a prompt; None
    if no datum said where its tokens come from. `arrays` are inputs of any shape, one per datum.
    """

    loss: Loss
    settings: Settings
    forward_only: bool
    tokens: Int64Array
    lengths: Int64Array
    targets: Int64Array
    widths: Int64Array
    trailing: Int64Array
    inputs: Mapping[str, Float32Array]
    arrays: Mapping[str, tuple[NDArray[np.generic], ...]]
    sequences: Int64Array | None
    totals: Totals

    @property
    def sizes(self) -> Int64Array:
        """How many target entries each datum has: [n]."""
        sizes: Int64Array = self.lengths * self.widths
        return sizes


def parse(payload: bytes) -> wire.ForwardBackwardRequest:
    """Parses the client's message. Raises `MalformedPayload` when it is not one."""
    message = wire.ForwardBackwardRequest()
    try:
        message.ParseFromString(payload)
    except DecodeError as error:
        raise MalformedPayload(
            f"the payload of {len(payload)} bytes is not a ForwardBackwardRequest: {error}"
        ) from error
    return message


def ranges(*, starts: Int64Array, sizes: Int64Array) -> Int64Array:
    """The indices `starts[i] … starts[i] + sizes[i] - 1` of all i, one after the other.

    Literal example: starts [5, 0], sizes [2, 3] give [5, 6, 0, 1, 2].
    """
    ends = np.cumsum(sizes)
    shifts = np.repeat(starts - (ends - sizes), sizes)
    result: Int64Array = shifts + np.arange(len(shifts), dtype=np.int64)
    return result


def starts_of(sizes: Int64Array) -> Int64Array:
    """Where each of consecutive pieces of these sizes begins."""
    result: Int64Array = np.cumsum(sizes) - sizes
    return result


def item_bytes(dtype: int) -> int:
    """Bytes per element of a wire type, or 0 for a type that we do not know."""
    known = _NUMPY_TYPES.get(dtype)
    return int(known.itemsize) if known is not None else 0


def read_integers(data: bytes, dtype: int) -> Int64Array:
    """Little-endian integers of a wire type as int64."""
    return np.frombuffer(data, _NUMPY_TYPES[dtype]).astype(np.int64, copy=False)


def read_floats(data: bytes, dtype: int) -> Float32Array:
    """Little-endian floats of a wire type as float32."""
    values = np.frombuffer(data, _NUMPY_TYPES[dtype])
    if dtype == wire.DTYPE_BFLOAT16:  # the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


MAX_DENSE_CELLS = 2**26
"""Of all sparse tensors of a request together, empty ones included: half a GiB as int64. A few
bytes can name a shape of any size."""


class DenseRoom:
    """What is left of the cells that a request's sparse tensors may come to."""

    def __init__(self, cells: int = MAX_DENSE_CELLS) -> None:
        self._cells = cells
        self._left = cells

    def take(self, cells: int, *, where: str) -> None:
        """Raises `LossInputShape` where there is too little left."""
        if cells > self._left:
            raise LossInputShape(
                f"{where} has {cells} cells when its empty ones are filled in; the sparse tensors "
                f"of a request may have {self._cells} together: send fewer datums at once, or "
                "fewer columns"
            )
        self._left -= cells


def densify(
    tensor: wire.Tensor, *, where: str, expected: tuple[int, ...], room: DenseRoom
) -> wire.Tensor:
    """A sparse (CSR) [N, K] tensor with its empty cells as zeros, as the SDK itself does it.

    `where` names the tensor in the sentence of a `LossInputShape`, which is raised when it has
    not the `expected` shape, when the three arrays do not describe a matrix of it, or when it
    does not fit into the `room`.
    """
    csr, shape, size = tensor.sparse_csr, tuple(tensor.shape), item_bytes(tensor.dtype)
    if len(shape) != 2 or not size:
        raise LossInputShape(f"{where}: a sparse tensor needs two dimensions, not {list(shape)}")
    if shape != expected:
        raise LossInputShape(f"{where} has the shape {list(shape)}; it must be {list(expected)}")
    rows, columns = shape
    if len(csr.values) % size or len(csr.crow_indices) % 8 or len(csr.col_indices) % 8:
        raise LossInputShape(f"{where}: the sparse arrays are cut off")
    values = np.frombuffer(csr.values, _NUMPY_TYPES[tensor.dtype])
    crow = np.frombuffer(csr.crow_indices, "<i8")
    column = np.frombuffer(csr.col_indices, "<i8")
    counts = np.diff(crow)
    if (
        rows < 0
        or columns < 0
        or len(crow) != rows + 1
        or crow[0] != 0
        or (counts < 0).any()
        or crow[-1] != len(values)
        or len(column) != len(values)
        or ((column < 0) | (column >= columns)).any()
    ):
        raise LossInputShape(f"{where}: the sparse arrays do not describe a {rows}x{columns} one")
    room.take(rows * columns, where=where)
    row = np.repeat(np.arange(rows), counts)
    if (np.diff(row * columns + column) <= 0).any():
        raise LossInputShape(f"{where}: the columns of a row must rise, each once")
    dense = np.zeros((rows, columns), values.dtype)
    dense[row, column] = values
    return wire.Tensor(dense=dense.tobytes(), dtype=tensor.dtype, shape=shape)
