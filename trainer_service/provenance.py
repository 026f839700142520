"""Provenance spans: which sampled sequence, or which prompt, a datum's tokens come from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from tandem.errors import LossInputShape
from tandem.wire.v1 import tinker_pb2 as wire
from trainer_service.batch import Int64Array

Spans = RepeatedCompositeFieldContainer[wire.ProvenanceSpan]


def read_sequences(
    data: Sequence[wire.Datum], *, lengths: Int64Array, widths: Int64Array
) -> Int64Array | None:
    """Numbers the sampled sequences of a batch: one number per target entry, -1 for entries
    that come from a prompt. A datum without spans is one sequence. None if no datum has any.

    Spans of one datum that name the same sequence count as one; two datums never share one.
    Raises `LossInputShape` for spans that do not tile what they describe.
    """
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
            # The targets are the model input moved by one, so both have the same length.
            where = f"datum {index}"
            _check(datum.model_input_spans, length, where=f"{where}, 'model_input_spans'")
            _check(datum.loss_fn_input_spans, length, where=f"{where}, 'loss_fn_input_spans'")
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


def _check(spans: Spans, length: int, *, where: str) -> None:
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
