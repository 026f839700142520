"""A micro-batch: some datums of a batch, packed into a row or padded into a rectangle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer_service.batch import Batch, Float32Array, Int64Array, ranges, starts_of
from trainer_service.losses.layout import Layout
from trainer_service.packing import Runs, runs_of


@dataclass(frozen=True)
class MicroBatch:
    """Datums as B rows of T tokens with at most K targets each; e entries are not padding.

    `tokens` [B, T], `targets` [B, T, K]; `select` [e] picks the real entries out of the flat
    [B·T·K] (None: all are real); `entries` [e] says where they lie in the batch's [E];
    `inputs` are the loss inputs, [e] each. A packed one has all datums in one row, and
    `positions` [1, T] and `runs` say where each begins.
    """

    tokens: Int64Array
    targets: Int64Array
    select: Int64Array | None
    entries: Int64Array
    inputs: Mapping[str, Float32Array]
    positions: Int64Array | None = None
    runs: Runs = ()


def make_micro_batch(batch: Batch, datums: Sequence[int], *, packed: bool) -> MicroBatch:
    """Padding is token 0 on the right: in a causal model no real token sees it."""
    chosen = np.array(datums, np.int64)
    lengths, widths = batch.lengths[chosen], batch.widths[chosen]
    rows, longest, widest = len(chosen), int(lengths.max()), int(widths.max())
    sizes = lengths * widths
    token_places = ranges(starts=starts_of(batch.lengths)[chosen], sizes=lengths)
    entries = ranges(starts=starts_of(batch.sizes)[chosen], sizes=sizes)
    inputs = {name: values[entries] for name, values in batch.inputs.items()}
    if packed:
        wide = np.repeat(widths, lengths)[:, None]
        wanted = np.arange(widest) < wide
        targets = np.zeros(wanted.shape, np.int64)
        targets[wanted] = batch.targets[entries]
        return MicroBatch(
            tokens=batch.tokens[token_places][None],
            targets=targets[None],
            select=None if wanted.all() else np.flatnonzero(wanted).astype(np.int64, copy=False),
            entries=entries,
            inputs=inputs,
            positions=ranges(starts=np.zeros_like(lengths), sizes=lengths)[None],
            runs=runs_of(lengths.tolist()),
        )
    if len(entries) == rows * longest * widest:
        return MicroBatch(
            tokens=batch.tokens[token_places].reshape(rows, longest),
            targets=batch.targets[entries].reshape(rows, longest, widest),
            select=None,
            entries=entries,
            inputs=inputs,
        )
    real = np.arange(longest) < lengths[:, None]
    wanted = real[:, :, None] & (np.arange(widest) < widths[:, None, None])
    tokens = np.zeros((rows, longest), np.int64)
    tokens[real] = batch.tokens[token_places]
    targets = np.zeros((rows, longest, widest), np.int64)
    targets[wanted] = batch.targets[entries]
    return MicroBatch(
        tokens=tokens,
        targets=targets,
        select=np.flatnonzero(wanted).astype(np.int64, copy=False),
        entries=entries,
        inputs=inputs,
    )


def layout_of(
    batch: Batch, micro_batch: MicroBatch, datums: Sequence[int], *, device: torch.device
) -> Layout:
    """What a loss is told of the micro-batch of these datums; tensors on `device`."""
    chosen = np.array(datums, np.int64)
    sizes = batch.sizes[chosen]
    datum = torch.from_numpy(np.repeat(np.arange(len(chosen)), sizes)).to(device)
    sequence, sequences = datum, len(chosen)
    if batch.sequences is not None:
        numbers, renumbered = np.unique(batch.sequences[micro_batch.entries], return_inverse=True)
        prompt = int(len(numbers) > 0 and numbers[0] < 0)  # prompt tokens stay -1
        sequence = torch.from_numpy(renumbered.astype(np.int64) - prompt).to(device)
        sequences = len(numbers) - prompt
    return Layout(
        datum=datum,
        datums=len(chosen),
        totals=batch.totals,
        sizes=tuple(sizes.tolist()),
        widths=tuple(batch.trailing[chosen].tolist()),
        sequence=sequence,
        sequences=sequences,
        arrays={
            name: tuple(torch.tensor(values[index]).to(device) for index in chosen.tolist())
            for name, values in batch.arrays.items()
        },
    )
