"""Leaves datums of old weights out of a batch.

The age of a datum is the trainer's optimizer step less the step of its oldest weights, which the
input `weight_step` names. The setting `max_staleness` of any loss bounds it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tandem.errors import StaleVersion
from trainer_service.batches.loss_inputs import Float32Array
from trainer_service.batches.validation import Batch, totals_of


@dataclass(frozen=True)
class FreshBatch:
    """`batch` without the datums of `whole` that are not `kept` [n]."""

    whole: Batch
    batch: Batch
    kept: NDArray[np.bool_]

    @property
    def bounded(self) -> bool:
        return self.whole.oldest is not None

    @property
    def dropped(self) -> int:
        return int(np.count_nonzero(~self.kept))

    def logprobs_of_whole(self, logprobs: Float32Array) -> Float32Array:
        """Return [E] of the whole batch. A dropped datum's are NaN."""
        if not self.dropped:
            return logprobs
        spread = np.full(int(self.whole.sizes.sum()), np.nan, np.float32)
        spread[np.repeat(self.kept, self.whole.sizes)] = logprobs
        return spread


def without_stale(batch: Batch, *, step: int) -> FreshBatch:
    """Drop the datums that are too old for a trainer at this optimizer step. A datum takes its
    group along. Raises `StaleVersion` with the setting `refuse_stale`."""
    kept = np.ones(len(batch.lengths), np.bool_)
    if batch.oldest is None:
        return FreshBatch(batch, batch, kept)
    bound, ages = batch.settings.number("max_staleness"), step - batch.oldest
    stale = ages > bound
    if not stale.any():
        return FreshBatch(batch, batch, kept)
    if batch.settings.has("refuse_stale") and batch.settings.number("refuse_stale"):
        first = int(np.argmax(stale))
        raise StaleVersion(
            f"datum {first} was sampled {int(ages[first])} steps before the trainer's step {step}, "
            f"and max_staleness is {bound:g}; send newer data, or raise max_staleness"
        )
    kept = np.repeat(~stale.reshape(-1, batch.loss.group).any(1), batch.loss.group)
    return FreshBatch(batch, _only(batch, kept), kept)


def _only(batch: Batch, kept: NDArray[np.bool_]) -> Batch:
    entries, tokens = np.repeat(kept, batch.sizes), np.repeat(kept, batch.lengths)
    smaller = replace(
        batch,
        tokens=batch.tokens[tokens],
        lengths=batch.lengths[kept],
        targets=batch.targets[entries],
        widths=batch.widths[kept],
        trailing=batch.trailing[kept],
        inputs={name: values[entries] for name, values in batch.inputs.items()},
        arrays={
            name: tuple(value for value, keep in zip(values, kept, strict=True) if keep)
            for name, values in batch.arrays.items()
        },
        sequences=None if batch.sequences is None else batch.sequences[entries],
    )
    totals = totals_of(batch.loss, smaller.inputs, sizes=smaller.sizes, sequences=smaller.sequences)
    return replace(smaller, totals=totals)
