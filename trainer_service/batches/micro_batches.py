"""Assigns datums to ranks and packs or pads them into micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_service.batches.loss_inputs import Float32Array, Int64Array, starts_of
from trainer_service.batches.validation import Batch
from trainer_service.losses.base import DatumLayout
from trainer_service.models.packing import bounds_of


def ranges(*, starts: Int64Array, sizes: Int64Array) -> Int64Array:
    """The indices `starts[i] … starts[i] + sizes[i] - 1` of all i, one after the other.

    Example: starts [5, 0], sizes [2, 3] give [5, 6, 0, 1, 2]."""
    ends = np.cumsum(sizes)
    shifts = np.repeat(starts - (ends - sizes), sizes)
    result: Int64Array = shifts + np.arange(len(shifts), dtype=np.int64)
    return result


MicroBatchPlan = tuple[int, ...]
RankPlan = tuple[MicroBatchPlan, ...]


def plan_batch(
    lengths: Sequence[int],
    *,
    ranks: int,
    micro_batch_tokens: int,
    group: int = 1,
    packed: bool = False,
) -> tuple[RankPlan, ...]:
    """Assign datums to the micro-batches of each rank: `plan[rank][micro_batch]` holds indices.

    `group` consecutive datums (2 for pairs) stay together and in order. Groups go to ranks longest
    first, each to the rank with the fewest tokens so far. A rank's groups are sorted by their
    longest datum and cut into micro-batches of at most `micro_batch_tokens` tokens, or of one
    longer group. Padding counts unless `packed`. All ranks get equally many micro-batches, because
    collectives must match. The empty ones are `()`.

    Example: lengths [3, 9, 4], two ranks, plenty of tokens: `(((1,),), ((2, 0),))`."""
    assert len(lengths) % group == 0, "validated"
    starts = range(0, len(lengths), group)
    longest = {start: max(lengths[start : start + group]) for start in starts}
    order = sorted(starts, key=lambda start: (-longest[start], start))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    if ranks == 1:
        shares[0] = order
    else:
        loads = [(0, rank) for rank in range(ranks)]
        for start in order:
            load, rank = loads[0]
            shares[rank].append(start)
            heapq.heapreplace(loads, (load + sum(lengths[start : start + group]), rank))
    if packed:
        sizes = {start: sum(lengths[start : start + group]) for start in starts}
        cuts = [_cut_packed(share, sizes, limit=micro_batch_tokens) for share in shares]
    else:
        cuts = [_cut_padded(share, longest, micro_batch_tokens, group) for share in shares]
    plans = [[_datums(part, group) for part in cut] for cut in cuts]
    most = max(len(plan) for plan in plans)
    return tuple((*plan, *(() for _ in range(most - len(plan)))) for plan in plans)


def _cut_padded(
    share: Sequence[int], longest: Mapping[int, int], limit: int, group: int
) -> list[Sequence[int]]:
    """`share` is sorted by falling length, so a micro-batch's first group has its width."""
    cut: list[Sequence[int]] = []
    at = 0
    while at < len(share):
        groups = max(1, limit // (longest[share[at]] * group))
        cut.append(share[at : at + groups])
        at += groups
    return cut


def _cut_packed(
    share: Sequence[int], sizes: Mapping[int, int], *, limit: int
) -> list[Sequence[int]]:
    cut: list[list[int]] = []
    held = limit
    for start in share:
        if held + sizes[start] > limit:
            cut.append([])
            held = 0
        cut[-1].append(start)
        held += sizes[start]
    return [*cut]


def _datums(starts: Sequence[int], group: int) -> MicroBatchPlan:
    return tuple(start + member for start in starts for member in range(group))


@dataclass(frozen=True)
class MicroBatch:
    """Some datums as B rows of T tokens with at most K targets each, e of them real.

    `tokens` [B, T], `targets` [B, T, K]. `select` [e] picks the real entries out of the flat
    [B·T·K] (None: all are real). `entries` [e] are their indices in the batch's [E]. `inputs` are
    the loss inputs, [e] each. A packed micro-batch has all datums in one row, and `positions` [1,
    T] and `bounds` (`bounds_of`) mark their starts."""

    tokens: Int64Array
    targets: Int64Array
    select: Int64Array | None
    entries: Int64Array
    inputs: Mapping[str, Float32Array]
    positions: Int64Array | None = None
    bounds: NDArray[np.int32] | None = None


def make_micro_batch(batch: Batch, datums: Sequence[int], *, packed: bool) -> MicroBatch:
    """Padding is token 0 on the right, unseen by real tokens of a causal model."""
    chosen = np.array(datums, np.int64)
    lengths, widths = batch.lengths[chosen], batch.widths[chosen]
    rows, longest, widest = len(chosen), int(lengths.max()), int(widths.max())
    sizes = lengths * widths
    token_places = ranges(starts=starts_of(batch.lengths)[chosen], sizes=lengths)
    entries = ranges(starts=starts_of(batch.sizes)[chosen], sizes=sizes)
    inputs = {name: values[entries] for name, values in batch.inputs.items()}
    if packed:
        wanted = np.arange(widest) < np.repeat(widths, lengths)[:, None]
        targets = np.zeros(wanted.shape, np.int64)
        targets[wanted] = batch.targets[entries]
        return MicroBatch(
            tokens=batch.tokens[token_places][None],
            targets=targets[None],
            select=None if wanted.all() else np.flatnonzero(wanted).astype(np.int64, copy=False),
            entries=entries,
            inputs=inputs,
            positions=ranges(starts=np.zeros_like(lengths), sizes=lengths)[None],
            bounds=bounds_of(lengths.tolist()),
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


def one_row(parts: Sequence[MicroBatch]) -> MicroBatch:
    """The sequences of packed micro-batches in one row, without targets."""
    lengths = np.concatenate(
        [np.diff(bounds) for part in parts if (bounds := part.bounds) is not None]
    )
    return MicroBatch(
        tokens=np.concatenate([part.tokens for part in parts], axis=1),
        targets=np.zeros((1, 0, 1), np.int64),
        select=None,
        entries=np.zeros(0, np.int64),
        inputs={},
        positions=ranges(starts=np.zeros_like(lengths, np.int64), sizes=lengths)[None],
        bounds=bounds_of(lengths.tolist()),
    )


STAND_IN_TOKENS = 2
"""A row of one token would compile separately."""


def stand_in(*, packed: bool) -> MicroBatch:
    """A small micro-batch for a rank without datums, so that its collectives match."""
    tokens = np.zeros((1, STAND_IN_TOKENS), np.int64)
    return MicroBatch(
        tokens=tokens,
        targets=tokens[..., None],
        select=None,
        entries=np.zeros(0, np.int64),
        inputs={},
        positions=np.arange(STAND_IN_TOKENS)[None] if packed else None,
        bounds=bounds_of([STAND_IN_TOKENS]) if packed else None,
    )


_COMPILED_TOKENS = 251
"""Tokens of a row. A prime, so that compiled code assumes no divisor."""


def micro_batches_to_compile(
    *, packed: bool, vocabulary: int, max_length: int
) -> Iterator[MicroBatch]:
    """One micro-batch of each kind that a compiler distinguishes."""
    tokens = min(_COMPILED_TOKENS, max_length or _COMPILED_TOKENS)
    for rows in (1,) if packed else (1, 2):
        ids = np.arange(rows * tokens).reshape(rows, tokens) % vocabulary
        yield MicroBatch(
            tokens=ids,
            targets=ids[..., None],
            select=None,
            entries=np.arange(rows * tokens),
            inputs={},
            positions=np.arange(tokens)[None] if packed else None,
            bounds=bounds_of([tokens]) if packed else None,
        )


def of_two_tokens(micro_batch: MicroBatch) -> MicroBatch:
    """Lengthen rows of one token, which a compiler takes for a constant, by a second token."""
    tokens = np.pad(micro_batch.tokens, ((0, 0), (0, 1)))
    if micro_batch.bounds is None:
        return replace(micro_batch, tokens=tokens)
    return replace(
        micro_batch, tokens=tokens, positions=np.zeros((1, 2), np.int64), bounds=bounds_of([1, 1])
    )


def layout_of(
    batch: Batch, micro_batch: MicroBatch, datums: Sequence[int], *, device: torch.device
) -> DatumLayout:
    chosen = np.array(datums, np.int64)
    sizes = batch.sizes[chosen]
    datum = torch.from_numpy(np.repeat(np.arange(len(chosen)), sizes)).to(device)
    sequence, sequences = datum, len(chosen)
    if batch.sequences is not None:
        numbers, renumbered = np.unique(batch.sequences[micro_batch.entries], return_inverse=True)
        prompt = int(len(numbers) > 0 and numbers[0] < 0)  # prompt tokens stay -1
        sequence = torch.from_numpy(renumbered.astype(np.int64) - prompt).to(device)
        sequences = len(numbers) - prompt
    return DatumLayout(
        datum=datum,
        datums=len(chosen),
        totals=batch.totals,
        sizes=tuple(sizes.tolist()),
        widths=tuple(batch.trailing[chosen].tolist()),
        sequence=sequence,
        sequences=sequences,
        arrays={
            name: tuple(torch.tensor(values[index]) for index in chosen.tolist())
            for name, values in batch.arrays.items()
        },
    )
