"""Where the entries of a micro-batch belong, and what the whole request amounts to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Totals:
    """Counts over the whole request: the same on every rank, in every lane and micro-batch.

    `entries` counts target tokens ([N, K] targets count N·K), `active` those of them that the
    loss acts on. A sum divided by one of these does not depend on how the request was split.
    """

    datums: int
    entries: int
    active: int


@dataclass(frozen=True)
class Layout:
    """The E entries of a micro-batch of whole datums, datum after datum.

    `datum` int64 [E]: which datum (0 … `datums` - 1) each entry belongs to. A loss with a group
    of 2 finds datums 2i and 2i + 1 of the request as neighbours here, the first one even.
    `sequence` int64 [E]: which sampled sequence (0 … `sequences` - 1) each entry is of, or -1
    for tokens of a prompt, if the client sent provenance spans; else the same as `datum`.
    `sizes`: entries of each datum; `widths`: K of each datum's [N, K] targets, 0 for [N].
    `arrays`: inputs declared with shape "free", one tensor of the client's shape per datum.

    Literal example: datums of 2 and 3 tokens have `datum` [0, 0, 1, 1, 1], `sizes` (2, 3).
    """

    datum: Tensor
    datums: int
    totals: Totals
    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    sequence: Tensor
    sequences: int
    arrays: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)

    def datum_sums(self, values: Tensor) -> Tensor:
        """[E] added up by datum: [datums]."""
        return values.new_zeros(self.datums).index_add(0, self.datum, values)

    def datum_means(self, values: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean of [E] by datum: [datums]; 0 for a datum without weight."""
        counts = self.datum_sums(weights)
        return self.datum_sums(values * weights) / counts.where(counts != 0, counts.new_ones(()))

    def sequence_means(self, values: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean by sampled sequence, given back to each of its entries: [E].

        Entries of a prompt, which are of no sequence, get 0.
        """
        of = self.sequence.clamp(min=0)
        weights = weights * (self.sequence >= 0)
        counts = values.new_zeros(self.sequences).index_add(0, of, weights)
        sums = values.new_zeros(self.sequences).index_add(0, of, values * weights)
        means = sums / counts.where(counts != 0, counts.new_ones(()))
        return means[of] * (self.sequence >= 0)
