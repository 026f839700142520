"""Reads and checks the tensors that a loss takes beside the targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tandem.errors import LossInputMissing, LossInputNotFinite, LossInputShape
from tandem.wire.v1 import tinker_pb2 as wire
from trainer_service.batch import (
    FLOAT_TYPES,
    INTEGER_TYPES,
    DenseRoom,
    Float32Array,
    Int64Array,
    densify,
    item_bytes,
    read_floats,
    read_integers,
    starts_of,
)
from trainer_service.losses.base import Input, Loss, Settings

TARGETS = "target_tokens"


@dataclass(frozen=True)
class InputReader:
    """Reads one input after the other for a batch of n datums; `read` [E] is what it has so far.

    `lengths` [n], and `trailing` [n]: the K of [N, K] targets, 0 for [N]. `sparse` says whether
    any targets came as a sparse matrix, `room` how large those of the request may be.
    """

    data: Sequence[wire.Datum]
    loss: Loss
    settings: Settings
    lengths: Int64Array
    trailing: Int64Array
    sparse: bool
    room: DenseRoom
    read: dict[str, Float32Array] = field(default_factory=dict)

    def add(self, given: Input) -> None:
        """Adds `given` to `read`, unless it may be absent and is. Raises what `validate` does."""
        sizes = self.lengths * np.maximum(self.trailing, 1)
        present = [given.name in datum.loss_fn_inputs for datum in self.data]
        if not all(present):
            self._check_absent(given, present)
            if not any(present) and not isinstance(given.default, float):
                return
        parts: list[bytes] = []
        types: list[int] = []
        starts = starts_of(sizes).tolist()
        for index, (datum, size) in enumerate(zip(self.data, sizes.tolist(), strict=True)):
            if present[index]:
                part, type_ = self._tensor(datum, given, index=index, size=size)
            else:
                values = self._default(given, start=starts[index], size=size)
                part, type_ = values.tobytes(), wire.DTYPE_FLOAT32
            parts.append(part)
            types.append(type_)
        if len(set(types)) == 1:
            values = _read(b"".join(parts), types[0])
        else:
            values = np.concatenate(
                [_read(part, type_) for part, type_ in zip(parts, types, strict=True)]
            )
        if given.finite and not np.isfinite(values).all():
            at = int(np.argmin(np.isfinite(values)))
            index = int(np.searchsorted(starts, at, side="right")) - 1
            position = (at - starts[index]) // max(int(self.trailing[index]), 1)
            raise LossInputNotFinite(
                f"datum {index}, position {position}: {given.name!r} is "
                f"{float(values[at])}; every value must be finite"
            )
        self.read[given.name] = values

    def _check_absent(self, given: Input, present: Sequence[bool]) -> None:
        name, index = given.name, present.index(False)
        needs = ", ".join((TARGETS, *self.loss.required))
        if given.required:
            raise LossInputMissing(f"datum {index} lacks {name!r}; {self.loss.name} needs {needs}")
        if given.needed_with and self.settings.number(given.needed_with):
            value = self.settings.number(given.needed_with)
            raise LossInputMissing(
                f"datum {index} lacks {name!r}, which {self.loss.name} needs since "
                f"{given.needed_with} is {value:g}"
            )
        if self.sparse and name == "weights":
            raise LossInputMissing(
                f"datum {index} lacks {name!r}; {self.loss.name} needs {needs}, {name} "
                "(weights say which cells of sparse targets count)"
            )
        if any(present) and given.default is None:
            raise LossInputMissing(
                f"datum {index} lacks {name!r}, which other datums have: give it to all or to none"
            )

    def _default(self, given: Input, *, start: int, size: int) -> Float32Array:
        default = given.default
        if isinstance(default, str):
            if default in self.read:
                return self.read[default][start : start + size]
            default = self.settings.number(default)
        assert default is not None, "checked"
        return np.full(size, default, "<f4")

    def _tensor(
        self, datum: wire.Datum, given: Input, *, index: int, size: int
    ) -> tuple[bytes, int]:
        where = f"datum {index}, {given.name!r}"
        tensor = datum.loss_fn_inputs[given.name]
        length, width = int(self.lengths[index]), int(self.trailing[index])
        entry = (length, width) if width else (length,)
        if tensor.HasField("sparse_csr"):
            tensor = densify(tensor, where=where, expected=entry, room=self.room)
        accepted = FLOAT_TYPES if given.shape == "entry" else FLOAT_TYPES | INTEGER_TYPES
        if tensor.dtype not in accepted:
            raise LossInputShape(f"{where} must be float32, not {type_name(tensor.dtype)}")
        shape = tuple(tensor.shape)
        one = given.shape != "entry" and (
            shape == (1,) or (not shape and len(tensor.dense) == item_bytes(tensor.dtype))
        )
        if one:
            check_bytes(tensor, count=1, where=where)
            return tensor.dense * size, tensor.dtype
        if given.shape == "datum":
            raise LossInputShape(
                f"{where} has the shape {list(shape)}; it must be one number per datum: [1]"
            )
        if shape and shape != entry:
            or_one = " or [1]" if given.shape == "either" else ""
            raise LossInputShape(
                f"{where} has the shape {list(shape)}; it must be that of {TARGETS}: "
                f"{list(entry)}{or_one}"
            )
        check_bytes(tensor, count=size, where=where)
        return tensor.dense, tensor.dtype


def read_array(
    datum: wire.Datum, given: Input, *, index: int, room: DenseRoom
) -> NDArray[np.generic]:
    """An input of its own shape and `given.rank` dimensions: float32 or int64."""
    where = f"datum {index}, {given.name!r}"
    if given.name not in datum.loss_fn_inputs:
        raise LossInputMissing(f"datum {index} lacks {given.name!r}, which the loss takes")
    tensor = datum.loss_fn_inputs[given.name]
    if tensor.HasField("sparse_csr"):
        tensor = densify(tensor, where=where, expected=tuple(tensor.shape), room=room)
    if tensor.dtype not in FLOAT_TYPES | INTEGER_TYPES:
        raise LossInputShape(f"{where} is of {type_name(tensor.dtype)}, which is not known")
    shape = tuple(tensor.shape)
    if not shape and given.rank == 1:  # the protocol lets the shape of one dimension out
        shape = (len(tensor.dense) // item_bytes(tensor.dtype),)
    if len(shape) != given.rank or min(shape, default=0) < 0:
        raise LossInputShape(
            f"{where} has the shape {list(shape)}, which is not of {given.rank} dimensions"
        )
    count = 1
    for size in shape:
        count *= size
    check_bytes(tensor, count=count, where=where)
    if tensor.dtype in INTEGER_TYPES:
        return read_integers(tensor.dense, tensor.dtype).reshape(shape)
    values = read_floats(tensor.dense, tensor.dtype).reshape(shape)
    if given.finite and not np.isfinite(values).all():
        raise LossInputNotFinite(f"{where} is not finite everywhere")
    return values


def active_entries(
    loss: Loss,
    inputs: Mapping[str, Float32Array],
    *,
    entries: int,
    sequences: Int64Array | None,
) -> int:
    """How many of a request's entries the loss acts on (see `Loss.active`)."""
    name = "mask" if "mask" in inputs else loss.active
    acts = inputs[name] != 0 if name else np.ones(entries, np.bool_)
    for given in loss.inputs:
        if not given.finite and given.name in inputs:
            acts &= np.isfinite(inputs[given.name])
    if loss.sampled_only and sequences is not None:
        acts &= sequences >= 0
    return int(np.count_nonzero(acts))


def _read(data: bytes, dtype: int) -> Float32Array:
    if dtype in INTEGER_TYPES:
        return read_integers(data, dtype).astype(np.float32)
    return read_floats(data, dtype)


def check_bytes(tensor: wire.Tensor, *, count: int, where: str) -> None:
    expected = count * item_bytes(tensor.dtype)
    if len(tensor.dense) != expected:
        raise LossInputShape(
            f"{where} has {len(tensor.dense)} bytes; {count} values of type "
            f"{type_name(tensor.dtype)} are {expected}"
        )


def type_name(dtype: int) -> str:
    try:
        return wire.DType.Name(dtype).removeprefix("DTYPE_").lower()  # type: ignore[arg-type]
    except ValueError:
        return f"type {dtype}"
