"""Which datum is computed by which rank, in which micro-batch. A pure function."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

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
    """Datum indices for each rank's micro-batches: `plan[rank][micro_batch]`.

    `group` consecutive datums (2 for pairs) stay together and in order. Groups go to ranks
    longest first, each to the rank with the fewest tokens so far. A rank's groups are sorted by
    their longest datum and cut into micro-batches of at most `micro_batch_tokens` tokens (or one
    group, should it alone be longer); padding counts unless they are `packed`. All ranks get
    the same number of micro-batches, since collectives must match; the empty ones are `()`.

    Literal example: lengths [3, 9, 4], two ranks, plenty of tokens: `(((1,),), ((2, 0),))`.
    """
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
    """`share` is sorted by falling length, so the first group of a micro-batch is its width."""
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
