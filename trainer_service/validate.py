"""Checks a forward_backward as a whole, before any gradient, and makes a `Batch` of it.

Every refusal says which datum, which input and which value was wrong, and what would be right.
Loss inputs that the loss does not use are ignored, as the protocol's own server does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.errors import (
    EmptyBatch,
    LossInputMissing,
    LossInputShape,
    MalformedPayload,
    SequenceTooLong,
    TokenOutOfVocabulary,
    UnknownLoss,
    UnsupportedInput,
)
from tandem.wire.v1 import tinker_pb2 as wire
from trainer_service.batch import (
    INTEGER_TYPES,
    Batch,
    DenseRoom,
    Int64Array,
    densify,
    read_integers,
    starts_of,
)
from trainer_service.loss_inputs import (
    TARGETS,
    InputReader,
    active_entries,
    check_bytes,
    read_array,
    type_name,
)
from trainer_service.loss_settings import read_settings
from trainer_service.losses.base import Loss
from trainer_service.losses.custom import CUSTOM
from trainer_service.losses.layout import Totals
from trainer_service.provenance import read_sequences


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
        if message.loss_fn == CUSTOM:
            raise UnknownLoss(
                "the loss 'custom' came without its definition: create one with "
                "ServiceClient.create_custom_loss and pass its handle to forward_backward_custom"
            )
        raise UnknownLoss(
            f"unknown loss {message.loss_fn[:100]!r}; known: {', '.join(sorted(losses))}"
        )
    settings = read_settings(message, loss)
    if not message.data:
        raise EmptyBatch("the batch has no datum")
    _check_groups(message.data, loss)
    tokens, lengths = _tokens(message.data, limits)
    room = DenseRoom()
    targets, trailing, sparse = _targets(message.data, lengths, loss, limits, room)
    widths = np.maximum(trailing, 1)
    sequences = read_sequences(message.data, lengths=lengths, widths=widths)
    reader = InputReader(
        data=message.data,
        loss=loss,
        settings=settings,
        lengths=lengths,
        trailing=trailing,
        sparse=sparse,
        room=room,
    )
    arrays = {}
    for given in loss.inputs:
        if given.shape == "free":
            arrays[given.name] = tuple(
                read_array(datum, given, index=index, room=room)
                for index, datum in enumerate(message.data)
            )
        else:
            reader.add(given)
    totals = Totals(
        datums=len(lengths),
        entries=len(targets),
        active=active_entries(loss, reader.read, entries=len(targets), sequences=sequences),
    )
    return Batch(
        loss=loss,
        settings=settings,
        forward_only=message.forward_only,
        tokens=tokens,
        lengths=lengths,
        targets=targets,
        widths=widths,
        trailing=trailing,
        inputs=reader.read,
        arrays=arrays,
        sequences=sequences,
        totals=totals,
    )


def _check_groups(data: Sequence[wire.Datum], loss: Loss) -> None:
    if len(data) % loss.group:
        raise LossInputShape(
            f"{loss.name} takes datums in groups of {loss.group}, and {len(data)} came; a client "
            "that cuts large batches into requests may have cut through a group: send fewer at once"
        )


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
    return ", ".join((TARGETS, *loss.required))


def _targets(
    data: Sequence[wire.Datum],
    lengths: Int64Array,
    loss: Loss,
    limits: Limits,
    room: DenseRoom,
) -> tuple[Int64Array, Int64Array, bool]:
    """Target tokens [E], the K of each datum (0 for one dimension), and whether any was sparse."""
    parts: list[bytes] = []
    trailing: list[int] = []
    types: set[int] = set()
    sparse = False
    for index, datum in enumerate(data):
        if TARGETS not in datum.loss_fn_inputs:
            raise LossInputMissing(
                f"datum {index} lacks {TARGETS!r}; {loss.name} needs {_needs(loss)}"
            )
        tensor = datum.loss_fn_inputs[TARGETS]
        where = f"datum {index}, {TARGETS!r}"
        if tensor.HasField("sparse_csr"):
            sparse = True
            # An empty cell must not cost more memory than there are tokens to choose from.
            columns = min(tensor.shape[1] if len(tensor.shape) == 2 else 0, limits.vocabulary)
            expected = (int(lengths[index]), columns)
            tensor = densify(tensor, where=where, expected=expected, room=room)
        if tensor.dtype not in INTEGER_TYPES:
            raise LossInputShape(f"{where} must be int64, not {type_name(tensor.dtype)}")
        shape = tuple(tensor.shape)
        length = int(lengths[index])
        flat = shape == (length,) or not shape
        if not flat and not (len(shape) == 2 and shape[0] == length and shape[1] >= 1):
            raise LossInputShape(
                f"{where} has the shape {list(shape)}; the model input has {length} tokens, "
                f"so it must be [{length}] or [{length}, K]"
            )
        if not flat and not loss.wide:
            raise LossInputShape(
                f"{where} has the shape {list(shape)}; {loss.name} takes one target per token: "
                f"[{length}]"
            )
        check_bytes(tensor, count=length * (1 if flat else shape[1]), where=where)
        trailing.append(0 if flat else shape[1])
        types.add(tensor.dtype)
        parts.append(tensor.dense)
    kinds = np.array(trailing, np.int64)
    if len(types) == 1:
        targets = read_integers(b"".join(parts), types.pop())
    else:
        targets = np.concatenate(
            [
                read_integers(part, d.loss_fn_inputs[TARGETS].dtype)
                for part, d in zip(parts, data, strict=True)
            ]
        )
    widths = np.maximum(kinds, 1)
    _check_vocabulary(
        targets, sizes=lengths * widths, widths=widths, limits=limits, what="target token"
    )
    return targets, kinds, sparse
