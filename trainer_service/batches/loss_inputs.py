"""Decodes and checks a loss's tensors (`loss_fn_inputs`) and settings (`loss_fn_config`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tandem.errors import (
    LossInputMissing,
    LossInputNotFinite,
    LossInputShape,
    UnknownLossSetting,
)
from tandem.wire.v1 import tinker_pb2 as wire
from trainer_service.losses.base import Input, Loss, LossSettings, Setting, SettingValue

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
_LARGEST = float(np.finfo(np.float32).max)


def starts_of(sizes: Int64Array) -> Int64Array:
    result: Int64Array = np.cumsum(sizes) - sizes
    return result


def item_bytes(dtype: int) -> int:
    """Bytes per element of a wire type, or 0 for an unknown type."""
    known = _NUMPY_TYPES.get(dtype)
    return int(known.itemsize) if known is not None else 0


def read_integers(data: bytes, dtype: int) -> Int64Array:
    return np.frombuffer(data, _NUMPY_TYPES[dtype]).astype(np.int64, copy=False)


def read_floats(data: bytes, dtype: int) -> Float32Array:
    values = np.frombuffer(data, _NUMPY_TYPES[dtype])
    if dtype == wire.DTYPE_BFLOAT16:  # the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


MAX_DENSE_CELLS = 2**26
"""Limit for all sparse tensors of a request, empty cells included: half a GiB as int64."""


class DenseBudget:
    def __init__(self, cells: int = MAX_DENSE_CELLS) -> None:
        self._cells = cells
        self._left = cells

    def spend_cells(self, cells: int, *, where: str) -> None:
        """Raise `LossInputShape` if fewer than `cells` are left."""
        if cells > self._left:
            raise LossInputShape(
                f"{where} has {cells} cells when its empty ones are filled in; the sparse tensors "
                f"of a request may have {self._cells} together: send fewer datums at once, or "
                "fewer columns"
            )
        self._left -= cells


def densify(
    tensor: wire.Tensor, *, where: str, expected: tuple[int, ...], budget: DenseBudget
) -> wire.Tensor:
    """Fill the empty cells of a sparse (CSR) [N, K] tensor with zeros, as the SDK does.

    Raises `LossInputShape`, naming the tensor as `where`, for another shape than `expected`,
    malformed arrays, or an exceeded `budget`."""
    csr, shape, size = tensor.sparse_csr, tuple(tensor.shape), item_bytes(tensor.dtype)
    if len(shape) != 2 or not size:
        raise LossInputShape(f"{where}: a sparse tensor needs two dimensions, not {list(shape)}")
    if shape != expected:
        raise LossInputShape(f"{where} has the shape {list(shape)}; it must be {list(expected)}")
    rows, columns = shape
    if len(csr.values) % size or len(csr.crow_indices) % 8 or len(csr.col_indices) % 8:
        raise LossInputShape(f"{where}: the sparse arrays are truncated")
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
    budget.spend_cells(rows * columns, where=where)
    row = np.repeat(np.arange(rows), counts)
    if (np.diff(row * columns + column) <= 0).any():
        raise LossInputShape(f"{where}: the columns of a row must rise, each once")
    dense = np.zeros((rows, columns), values.dtype)
    dense[row, column] = values
    return wire.Tensor(dense=dense.tobytes(), dtype=tensor.dtype, shape=shape)


TARGETS = "target_tokens"
WEIGHT_STEP = "weight_step"
STALENESS_SETTINGS = (
    Setting("max_staleness", 0.0, "the oldest age of a datum, in optimizer steps", low=0.0),
    Setting("refuse_stale", 0.0, "1: refuse a batch with an older datum, instead of the datum"),
)
"""Settings of every loss, see `staleness.py`. Without `max_staleness` no age counts."""
_NEWER = np.iinfo(np.int64).max
"""The step of a datum that no weights sampled."""


@dataclass(frozen=True)
class InputReader:
    """Reads the inputs of a batch of n datums, one at a time, into `read` ([E] each).

    `lengths` [n]. `trailing` [n] is the K of [N, K] targets, 0 for [N]."""

    data: Sequence[wire.Datum]
    loss: Loss
    settings: LossSettings
    lengths: Int64Array
    trailing: Int64Array
    sparse: bool
    budget: DenseBudget
    read: dict[str, Float32Array] = field(default_factory=dict)

    def read_input(self, given: Input) -> None:
        """Add the input to `read`, unless it is absent and optional. Raises a `UserError`."""
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
            tensor = densify(tensor, where=where, expected=entry, budget=self.budget)
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
    datum: wire.Datum, given: Input, *, index: int, budget: DenseBudget
) -> NDArray[np.generic]:
    """Read an input of any shape with `given.rank` dimensions, as float32 or int64.

    Raises `LossInputMissing`, `LossInputShape` or `LossInputNotFinite`."""
    where = f"datum {index}, {given.name!r}"
    if given.name not in datum.loss_fn_inputs:
        raise LossInputMissing(f"datum {index} lacks {given.name!r}, which the loss takes")
    tensor = datum.loss_fn_inputs[given.name]
    _check_extent(tensor, where=where)
    if tensor.HasField("sparse_csr"):
        tensor = densify(tensor, where=where, expected=tuple(tensor.shape), budget=budget)
    if tensor.dtype not in FLOAT_TYPES | INTEGER_TYPES:
        raise LossInputShape(
            f"{where} has the unknown type {type_name(tensor.dtype)}; send float32 or int64"
        )
    shape = tuple(tensor.shape)
    if not shape and given.rank == 1:  # the protocol omits the shape of one dimension
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


def oldest_steps(data: Sequence[wire.Datum], lengths: Int64Array) -> Int64Array:
    """Return the step of each datum's oldest weights: [n].

    A datum gives one step ([1]) or one for each token ([N]). Negative ones stand for tokens that no
    weights sampled. Raises `LossInputMissing` or `LossInputShape`."""
    oldest = np.full(len(data), _NEWER, np.int64)
    for index, (datum, length) in enumerate(zip(data, lengths.tolist(), strict=True)):
        if WEIGHT_STEP not in datum.loss_fn_inputs:
            raise LossInputMissing(
                f"datum {index} lacks {WEIGHT_STEP!r}, which max_staleness needs: the optimizer "
                "step of the weights that sampled it"
            )
        tensor, where = datum.loss_fn_inputs[WEIGHT_STEP], f"datum {index}, {WEIGHT_STEP!r}"
        if tensor.dtype not in INTEGER_TYPES:
            raise LossInputShape(f"{where} must be int64, not {type_name(tensor.dtype)}")
        shape = tuple(tensor.shape)
        one = shape == (1,) or (not shape and len(tensor.dense) == item_bytes(tensor.dtype))
        if tensor.HasField("sparse_csr") or not (one or shape in ((), (length,))):
            raise LossInputShape(
                f"{where} has the shape {list(shape)}; it must be [1], or [{length}] for the "
                "tokens, and dense"
            )
        check_bytes(tensor, count=1 if one else length, where=where)
        steps = read_integers(tensor.dense, tensor.dtype)
        oldest[index] = min(steps[steps >= 0].tolist(), default=_NEWER)
    return oldest


def _check_extent(tensor: wire.Tensor, *, where: str) -> None:
    """Bound the shape of an empty tensor: numpy and torch raise for an extent beyond int64."""
    extent = math.prod(size for size in tensor.shape if size)
    if 0 in tensor.shape and extent > MAX_DENSE_CELLS:
        raise LossInputShape(
            f"{where} has the shape {list(tensor.shape)}; the dimensions of an empty input may not "
            f"make more than {MAX_DENSE_CELLS} together"
        )


def active_entries(
    loss: Loss,
    inputs: Mapping[str, Float32Array],
    *,
    entries: int,
    sequences: Int64Array | None,
) -> NDArray[np.bool_]:
    """Return the entries that the loss acts on: [E]."""
    name = "mask" if "mask" in inputs else loss.active
    acts = inputs[name] != 0 if name else np.ones(entries, np.bool_)
    for given in loss.inputs:
        if not given.finite and given.name in inputs:
            acts &= np.isfinite(inputs[given.name])
    if loss.sampled_only and sequences is not None:
        acts &= sequences >= 0
    return acts


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


def read_settings(message: wire.ForwardBackwardRequest, loss: Loss) -> LossSettings:
    declared = {setting.name: setting for setting in loss.settings}
    accepted = declared | {setting.name: setting for setting in STALENESS_SETTINGS}
    values = loss.defaults.as_dict()
    for name, value in _given_settings(message).items():
        if name not in accepted:
            known = ", ".join(sorted(declared)) or "none"
            raise UnknownLossSetting(
                f"{loss.name} has no setting {name[:100]!r}; its settings: {known}"
            )
        _check_setting(value, accepted[name], loss)
        values[name] = value
    settings = LossSettings(values)
    _check_bounds_in_order(settings, loss)
    loss.check(settings)
    return settings


def _given_settings(message: wire.ForwardBackwardRequest) -> dict[str, SettingValue]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    # Clients write both maps. Only this one can hold text.
    return {
        name: value.text if value.WhichOneof("value") == "text" else value.number
        for name, value in message.loss_fn_config_v2.items()
    }


def _check_setting(value: SettingValue, setting: Setting, loss: Loss) -> None:
    what = f"the setting {setting.name!r} of {loss.name}"
    if isinstance(setting.default, str):
        if not isinstance(value, str):
            raise UnknownLossSetting(f"{what} must be a text, not the number {value!r}")
        if setting.choices and value not in setting.choices:
            raise UnknownLossSetting(
                f"{what} must be one of {', '.join(setting.choices)}, not {value[:100]!r}"
            )
        return
    if isinstance(value, str) or not math.isfinite(value):
        given = value[:100] if isinstance(value, str) else value
        raise UnknownLossSetting(f"{what} must be a finite number, not {given!r}")
    if abs(value) > _LARGEST:  # torch raises when such a number meets float32
        raise UnknownLossSetting(
            f"{what} must fit float32, whose largest number is {_LARGEST:g}, not be {value:g}"
        )
    low = setting.low
    if low is not None and (value < low or (setting.above and value == low)):
        bound = "above" if setting.above else "at least"
        raise UnknownLossSetting(f"{what} must be {bound} {low:g}, not {value:g}")


def _check_bounds_in_order(settings: LossSettings, loss: Loss) -> None:
    for low_name in (each.name for each in loss.settings if "low" in each.name.split("_")):
        high_name = low_name.replace("low", "high")
        if not settings.has(high_name):
            continue
        low, high = settings.number(low_name), settings.number(high_name)
        if low > high:
            raise UnknownLossSetting(
                f"{low_name} ({low:g}) of {loss.name} is above {high_name} ({high:g})"
            )
