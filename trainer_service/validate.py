"""Checks a forward_backward as a whole, before any gradient, and makes a `Batch` of it.

Every refusal says which datum, which input and which value was wrong, and what would be right.
Loss inputs that the loss does not use are ignored, as the protocol's own server does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.errors import (
    EmptyBatch,
    LossInputMissing,
    LossInputNotFinite,
    LossInputShape,
    MalformedPayload,
    SequenceTooLong,
    TokenOutOfVocabulary,
    UnknownLoss,
    UnknownLossSetting,
    UnsupportedInput,
)
from tandem.wire.v1 import tinker_pb2 as wire
from trainer_service.batch import (
    FLOAT_TYPES,
    INTEGER_TYPES,
    Batch,
    Float32Array,
    Int64Array,
    densify,
    item_bytes,
    read_floats,
    read_integers,
    starts_of,
)
from trainer_service.losses.base import Loss

_TARGETS = "target_tokens"


@dataclass(frozen=True)
class Limits:
    """What the model takes: token ids below `vocabulary`, sequences up to `max_length` tokens
    (0: any length)."""

    vocabulary: int
    max_length: int


def validate(
    message: wire.ForwardBackwardRequest, *, losses: Mapping[str, Loss], limits: Limits
) -> Batch:
    """Raises the `UserError` that fits best; returns a batch of which nothing needs checking."""
    loss = losses.get(message.loss_fn)
    if loss is None:
        raise UnknownLoss(f"unknown loss {message.loss_fn!r}; known: {', '.join(sorted(losses))}")
    settings = _settings(message, loss)
    if not message.data:
        raise EmptyBatch("the batch has no datum")
    tokens, lengths = _tokens(message.data, limits)
    targets, trailing, sparse = _targets(message.data, lengths, loss, limits)
    widths = np.maximum(trailing, 1)
    inputs = {}
    for name in loss.inputs:
        inputs[name] = _floats(
            message.data, name=name, loss=loss, lengths=lengths, trailing=trailing, sparse=sparse
        )
    return Batch(
        loss=loss.name,
        settings=settings,
        forward_only=message.forward_only,
        tokens=tokens,
        lengths=lengths,
        targets=targets,
        widths=widths,
        trailing=trailing,
        inputs=inputs,
    )


def _settings(message: wire.ForwardBackwardRequest, loss: Loss) -> dict[str, float]:
    settings = dict(loss.settings)
    given: dict[str, float | str] = {}
    if message.loss_fn_config_v2:  # clients write both; this one can hold text, too
        for name, value in message.loss_fn_config_v2.items():
            given[name] = value.text if value.WhichOneof("value") == "text" else value.number
    else:
        given.update(message.loss_fn_config)
    for name, number in given.items():
        if name not in settings:
            known = ", ".join(sorted(settings)) or "none"
            raise UnknownLossSetting(f"{loss.name} has no setting {name!r}; its settings: {known}")
        if isinstance(number, str) or not math.isfinite(number):
            raise UnknownLossSetting(
                f"the setting {name!r} of {loss.name} must be a finite number, not {number!r}"
            )
        settings[name] = number
    low, high = settings.get("clip_low_threshold"), settings.get("clip_high_threshold")
    if low is not None and high is not None and low > high:
        raise UnknownLossSetting(
            f"clip_low_threshold ({low}) of {loss.name} is above clip_high_threshold ({high})"
        )
    return settings


def _tokens(data: Sequence[wire.Datum], limits: Limits) -> tuple[Int64Array, Int64Array]:
    parts: list[bytes] = []
    counts: list[int] = []
    for index, datum in enumerate(data):
        count = 0
        for chunk in datum.model_input:
            kind = chunk.WhichOneof("chunk")
            if kind != "encoded_text":
                raise UnsupportedInput(
                    f"datum {index}: a chunk of kind {kind or 'unknown'} is not supported; "
                    "this model takes encoded text alone"
                )
            part = chunk.encoded_text.tokens
            if len(part) % 4:
                raise MalformedPayload(
                    f"datum {index}: {len(part)} bytes of tokens are not whole int32 numbers"
                )
            count += len(part) // 4
            parts.append(part)
        if not count:
            raise EmptyBatch(f"datum {index} has no token")
        counts.append(count)
    lengths = np.array(counts, np.int64)
    if limits.max_length and int(lengths.max()) > limits.max_length:
        index = int(np.argmax(lengths > limits.max_length))
        raise SequenceTooLong(
            f"datum {index} has {counts[index]} tokens; the model takes {limits.max_length} at most"
        )
    tokens = read_integers(b"".join(parts), wire.DTYPE_INT32)
    _check_vocabulary(tokens, sizes=lengths, widths=None, limits=limits, what="token")
    return tokens, lengths


def _check_vocabulary(
    values: Int64Array, *, sizes: Int64Array, widths: Int64Array | None, limits: Limits, what: str
) -> None:
    if int(values.min()) >= 0 and int(values.max()) < limits.vocabulary:
        return
    at = int(np.argmax((values < 0) | (values >= limits.vocabulary)))
    index, offset = _locate(at, sizes)
    position = offset if widths is None else offset // int(widths[index])
    raise TokenOutOfVocabulary(
        f"datum {index}, position {position}: {what} {int(values[at])} is outside the vocabulary "
        f"of {limits.vocabulary} tokens (0 to {limits.vocabulary - 1})"
    )


def _locate(at: int, sizes: Int64Array) -> tuple[int, int]:
    """Which datum, and which place in it, an index into the flat values is."""
    starts = starts_of(sizes)
    index = int(np.searchsorted(starts, at, side="right")) - 1
    return index, at - int(starts[index])


def _needs(loss: Loss) -> str:
    return ", ".join((_TARGETS, *loss.required))


def _targets(
    data: Sequence[wire.Datum], lengths: Int64Array, loss: Loss, limits: Limits
) -> tuple[Int64Array, Int64Array, bool]:
    """Target tokens [E], the K of each datum (0 for one dimension), and whether any was sparse."""
    parts: list[bytes] = []
    trailing: list[int] = []
    types: set[int] = set()
    sparse = False
    for index, datum in enumerate(data):
        if _TARGETS not in datum.loss_fn_inputs:
            raise LossInputMissing(
                f"datum {index} lacks {_TARGETS!r}; {loss.name} needs {_needs(loss)}"
            )
        tensor = datum.loss_fn_inputs[_TARGETS]
        where = f"datum {index}, {_TARGETS!r}"
        if tensor.HasField("sparse_csr"):
            sparse = True
            tensor = densify(tensor, where=where)
        if tensor.dtype not in INTEGER_TYPES:
            raise LossInputShape(f"{where} must be int64, not {_type_name(tensor.dtype)}")
        shape = tuple(tensor.shape)
        length = int(lengths[index])
        flat = shape == (length,) or not shape
        if not flat and not (len(shape) == 2 and shape[0] == length and shape[1] >= 1):
            raise LossInputShape(
                f"{where} has the shape {list(shape)}; the model input has {length} tokens, "
                f"so it must be [{length}] or [{length}, K]"
            )
        if not flat and loss.name != "cross_entropy":
            raise LossInputShape(
                f"{where} has the shape {list(shape)}; {loss.name} takes one target per token: "
                f"[{length}]"
            )
        _check_bytes(tensor, count=length * (1 if flat else shape[1]), where=where)
        trailing.append(0 if flat else shape[1])
        types.add(tensor.dtype)
        parts.append(tensor.dense)
    kinds = np.array(trailing, np.int64)
    if len(types) == 1:
        targets = read_integers(b"".join(parts), types.pop())
    else:
        targets = np.concatenate(
            [
                read_integers(part, d.loss_fn_inputs[_TARGETS].dtype)
                for part, d in zip(parts, data, strict=True)
            ]
        )
    widths = np.maximum(kinds, 1)
    _check_vocabulary(
        targets, sizes=lengths * widths, widths=widths, limits=limits, what="target token"
    )
    return targets, kinds, sparse


def _floats(
    data: Sequence[wire.Datum],
    *,
    name: str,
    loss: Loss,
    lengths: Int64Array,
    trailing: Int64Array,
    sparse: bool,
) -> Float32Array:
    """One float input of all datums, [E]; where it may be absent, its default."""
    parts: list[bytes] = []
    types: list[int] = []
    for index, (datum, length, width) in enumerate(
        zip(data, lengths.tolist(), trailing.tolist(), strict=True)
    ):
        where = f"datum {index}, {name!r}"
        count = length * max(width, 1)
        if name not in datum.loss_fn_inputs:
            if name in loss.required or sparse:
                needs = _needs(loss) if not sparse else f"{_needs(loss)}, {name}"
                raise LossInputMissing(
                    f"datum {index} lacks {name!r}; {loss.name} needs {needs}"
                    + (" (weights say which cells of sparse targets count)" if sparse else "")
                )
            parts.append(np.full(count, loss.defaults[name], "<f4").tobytes())
            types.append(wire.DTYPE_FLOAT32)
            continue
        tensor = datum.loss_fn_inputs[name]
        if tensor.HasField("sparse_csr"):
            tensor = densify(tensor, where=where)
        if tensor.dtype not in FLOAT_TYPES:
            raise LossInputShape(f"{where} must be float32, not {_type_name(tensor.dtype)}")
        shape = tuple(tensor.shape)
        expected = (length, width) if width else (length,)
        if shape and shape != expected:
            raise LossInputShape(
                f"{where} has the shape {list(shape)}; it must be that of {_TARGETS}: "
                f"{list(expected)}"
            )
        _check_bytes(tensor, count=count, where=where)
        parts.append(tensor.dense)
        types.append(tensor.dtype)
    if len(set(types)) == 1:
        values = read_floats(b"".join(parts), types[0])
    else:
        values = np.concatenate(
            [read_floats(part, type_) for part, type_ in zip(parts, types, strict=True)]
        )
    if not np.isfinite(values).all():
        at = int(np.argmin(np.isfinite(values)))
        widths = np.maximum(trailing, 1)
        index, offset = _locate(at, lengths * widths)
        raise LossInputNotFinite(
            f"datum {index}, position {offset // int(widths[index])}: {name!r} is "
            f"{float(values[at])}; every value must be finite"
        )
    return values


def _check_bytes(tensor: wire.Tensor, *, count: int, where: str) -> None:
    expected = count * item_bytes(tensor.dtype)
    if len(tensor.dense) != expected:
        raise LossInputShape(
            f"{where} has {len(tensor.dense)} bytes; {count} values of type "
            f"{_type_name(tensor.dtype)} are {expected}"
        )


def _type_name(dtype: int) -> str:
    try:
        return wire.DType.Name(dtype).removeprefix("DTYPE_").lower()  # type: ignore[arg-type]
    except ValueError:
        return f"type {dtype}"
