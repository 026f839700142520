"""Checks a forward_backward message before any gradient is computed, and makes a `Batch` of it.

Every error names the datum, the input and the wrong value, and says how to correct it. Unused
inputs are ignored, as by the protocol's own server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from tandem.errors import (
    EmptyBatch,
    LossInputMissing,
    LossInputShape,
    MalformedPayload,
    SequenceTooLong,
    TokenOutOfVocabulary,
    UnsupportedInput,
)
from tandem.wire.v1 import tinker_pb2 as wire
from trainer_service.batches.loss_inputs import (
    INTEGER_TYPES,
    TARGETS,
    DenseBudget,
    Float32Array,
    InputReader,
    Int64Array,
    active_entries,
    check_bytes,
    densify,
    oldest_steps,
    read_array,
    read_integers,
    read_settings,
    starts_of,
    type_name,
)
from trainer_service.losses import find_loss
from trainer_service.losses.base import Loss, LossSettings, Totals


@dataclass(frozen=True)
class Batch:
    """n datums as flat arrays: the values of all datums, one datum after the other.

    `tokens` [Σ lengths], `lengths` [n]: the model input. `targets` [E] and each of `inputs` [E]
    hold each datum's [N] or [N, K] values row by row. `widths` [n] is K, and E = Σ lengths·widths.
    `trailing` [n] is the client's K, or 0 for targets of one dimension. `sequences` [E] numbers the
    sampled sequences of the batch, -1 for prompt tokens. It is None if no datum has provenance
    spans. `arrays` are the inputs of shape "free", one per datum. `oldest` [n] is the step of each
    datum's oldest weights, None if no bound needs it."""

    loss: Loss
    settings: LossSettings
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
    oldest: Int64Array | None

    @property
    def sizes(self) -> Int64Array:
        """Number of target entries of each datum: [n]."""
        sizes: Int64Array = self.lengths * self.widths
        return sizes


def parse(payload: bytes) -> wire.ForwardBackwardRequest:
    """Raises `MalformedPayload`."""
    message = wire.ForwardBackwardRequest()
    try:
        message.ParseFromString(payload)
    except DecodeError as error:
        raise MalformedPayload(
            f"the payload of {len(payload)} bytes is not a ForwardBackwardRequest: {error}"
        ) from error
    return message


def is_forward(payload: bytes) -> bool:
    """True for a forward pass, which leaves no gradients, even if the rest of the payload is
    malformed."""
    try:
        return wire.ForwardBackwardRouting.FromString(payload).forward_only
    except DecodeError:
        return False


@dataclass(frozen=True)
class BatchLimits:
    """Token ids are below `vocabulary`, sequences have at most `max_length` tokens (0: any)."""

    vocabulary: int
    max_length: int


def validate(
    message: wire.ForwardBackwardRequest, *, limits: BatchLimits, definition: bytes = b""
) -> Batch:
    """Return a checked batch, or raise a `UserError`. `definition`: see `find_loss`."""
    loss = find_loss(message.loss_fn, definition=definition)
    settings = read_settings(message, loss)
    if not message.data:
        raise EmptyBatch("the batch has no datum; send at least one")
    _check_groups(message.data, loss)
    tokens, lengths = _tokens(message.data, limits)
    budget = DenseBudget()
    targets, trailing, sparse = _targets(message.data, lengths, loss, limits, budget)
    widths = np.maximum(trailing, 1)
    sequences = read_sequences(message.data, lengths=lengths, widths=widths)
    reader = InputReader(
        data=message.data,
        loss=loss,
        settings=settings,
        lengths=lengths,
        trailing=trailing,
        sparse=sparse,
        budget=budget,
    )
    arrays = {}
    for given in loss.inputs:
        if given.shape == "free":
            arrays[given.name] = tuple(
                read_array(datum, given, index=index, budget=budget)
                for index, datum in enumerate(message.data)
            )
        else:
            reader.read_input(given)
    bounded = settings.has("max_staleness")
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
        totals=totals_of(loss, reader.read, sizes=lengths * widths, sequences=sequences),
        oldest=oldest_steps(message.data, lengths) if bounded else None,
    )


def totals_of(
    loss: Loss,
    inputs: Mapping[str, Float32Array],
    *,
    sizes: Int64Array,
    sequences: Int64Array | None,
) -> Totals:
    """Count over a batch with `sizes` [n] entries of each datum."""
    acts = active_entries(loss, inputs, entries=int(sizes.sum()), sequences=sequences)
    by_datum = np.logical_or.reduceat(acts, starts_of(sizes)) if len(sizes) else acts
    return Totals(
        datums=len(sizes),
        entries=len(acts),
        active=int(np.count_nonzero(acts)),
        active_datums=int(np.count_nonzero(by_datum)),
    )


def _check_groups(data: Sequence[wire.Datum], loss: Loss) -> None:
    if len(data) % loss.group:
        raise LossInputShape(
            f"{loss.name} takes datums in groups of {loss.group}, and {len(data)} came; a client "
            "that cuts large batches into requests may have cut through a group: send fewer at once"
        )


def _tokens(data: Sequence[wire.Datum], limits: BatchLimits) -> tuple[Int64Array, Int64Array]:
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
            raise EmptyBatch(f"datum {index} has no token; give every datum at least one")
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
    values: Int64Array,
    *,
    sizes: Int64Array,
    widths: Int64Array | None,
    limits: BatchLimits,
    what: str,
) -> None:
    if int(values.min()) >= 0 and int(values.max()) < limits.vocabulary:
        return
    at = int(np.argmax((values < 0) | (values >= limits.vocabulary)))
    index, offset = _locate(at, sizes)
    position = offset if widths is None else offset // int(widths[index])
    raise TokenOutOfVocabulary(
        f"datum {index}, position {position}: {what} {int(values[at])} is outside the vocabulary "
        f"of {limits.vocabulary} tokens (0 to {limits.vocabulary - 1}); encode text with the "
        "model's tokenizer"
    )


def _locate(at: int, sizes: Int64Array) -> tuple[int, int]:
    starts = starts_of(sizes)
    index = int(np.searchsorted(starts, at, side="right")) - 1
    return index, at - int(starts[index])


def _needs(loss: Loss) -> str:
    return ", ".join((TARGETS, *loss.required))


def _targets(
    data: Sequence[wire.Datum],
    lengths: Int64Array,
    loss: Loss,
    limits: BatchLimits,
    budget: DenseBudget,
) -> tuple[Int64Array, Int64Array, bool]:
    """Return target tokens [E], the K of each datum (0 for one dimension), and whether any were
    sparse."""
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
            # Bound the memory for empty cells: no row has more targets than the vocabulary.
            columns = min(tensor.shape[1] if len(tensor.shape) == 2 else 0, limits.vocabulary)
            expected = (int(lengths[index]), columns)
            tensor = densify(tensor, where=where, expected=expected, budget=budget)
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


Spans = RepeatedCompositeFieldContainer[wire.ProvenanceSpan]


def read_sequences(
    data: Sequence[wire.Datum], *, lengths: Int64Array, widths: Int64Array
) -> Int64Array | None:
    """Number the sampled sequences of a batch, per target entry. Prompt entries get -1.

    A datum without spans is one sequence. Returns None if no datum has spans. Two datums never
    share a number. Raises `LossInputShape` for spans that do not cover their datum exactly."""
    if not any(datum.model_input_spans or datum.loss_fn_input_spans for datum in data):
        return None
    parts: list[Int64Array] = []
    count = 0
    for index, (datum, length, width) in enumerate(
        zip(data, lengths.tolist(), widths.tolist(), strict=True)
    ):
        if not datum.model_input_spans and not datum.loss_fn_input_spans:
            numbers = np.full(length, count, np.int64)
            count += 1
        else:
            # Targets are the model input shifted by one, so both have equal length.
            where = f"datum {index}"
            _check_spans(datum.model_input_spans, length, where=f"{where}, 'model_input_spans'")
            _check_spans(datum.loss_fn_input_spans, length, where=f"{where}, 'loss_fn_input_spans'")
            known: dict[str, int] = {}
            numbers = np.empty(length, np.int64)
            at = 0
            for span in datum.loss_fn_input_spans:
                if span.WhichOneof("source") == "sampled_tokens":
                    size = span.sampled_tokens.length
                    number = known.setdefault(span.sampled_tokens.sequence_id, count + len(known))
                else:
                    size, number = span.prompt_tokens.length, -1
                numbers[at : at + size] = number
                at += size
            count += len(known)
        parts.append(np.repeat(numbers, width))
    return np.concatenate(parts)


def _check_spans(spans: Spans, length: int, *, where: str) -> None:
    total = 0
    for number, span in enumerate(spans):
        kind = span.WhichOneof("source")
        if kind is None:
            raise LossInputShape(f"{where}: span {number} names neither prompt nor sampled tokens")
        part = span.sampled_tokens if kind == "sampled_tokens" else span.prompt_tokens
        if not part.sequence_id:
            raise LossInputShape(f"{where}: span {number} has no sequence_id")
        if part.offset < 0 or part.length < 0:
            raise LossInputShape(
                f"{where}: span {number} has offset {part.offset} and length {part.length}; "
                "neither may be negative"
            )
        total += part.length
    if total != length:
        raise LossInputShape(
            f"{where} cover {total} positions, but the datum has {length}; the spans must tile "
            "it exactly, in both lists"
        )
