"""Which datum is computed by which rank, in which micro-batch. A pure function."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

MicroBatchPlan = tuple[int, ...]
RankPlan = tuple[MicroBatchPlan, ...]


def plan_batch(
    lengths: Sequence[int], *, ranks: int, micro_batch_tokens: int
) -> tuple[RankPlan, ...]:
    """Datum indices for each rank's micro-batches: `plan[rank][micro_batch]`.

    Datums go to ranks longest first, each to the rank with the fewest tokens so far. A rank's
    datums are sorted by length and cut into micro-batches of at most `micro_batch_tokens`
    padded tokens (or one datum, should it alone be longer). All ranks get the same number of
    micro-batches, since collectives must match; the empty ones are `()`.

    Literal example: lengths [3, 9, 4], two ranks, plenty of tokens: `(((1,),), ((2, 0),))`.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    if ranks == 1:
        shares[0] = order
    else:
        loads = [(0, rank) for rank in range(ranks)]
        for index in order:
            load, rank = loads[0]
            shares[rank].append(index)
            heapq.heapreplace(loads, (load + lengths[index], rank))
    plans = [_cut(share, lengths, micro_batch_tokens) for share in shares]
    most = max(len(plan) for plan in plans)
    return tuple((*plan, *(() for _ in range(most - len(plan)))) for plan in plans)


def _cut(share: Sequence[int], lengths: Sequence[int], limit: int) -> list[MicroBatchPlan]:
    """`share` is sorted by falling length, so the first datum of a micro-batch is its width."""
    plan: list[MicroBatchPlan] = []
    start = 0
    while start < len(share):
        rows = max(1, limit // lengths[share[start]])
        plan.append(tuple(share[start : start + rows]))
        start += rows
    return plan
