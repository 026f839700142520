"""Which rank writes which tensor: balanced by size, the same answer on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Mapping


def assign_owners(sizes: Mapping[str, int], *, ranks: int) -> dict[str, int]:
    """The owner of each unit: largest first, each to the rank with the least so far.

    Literal example: `assign_owners({"a": 5, "b": 3, "c": 3}, ranks=2)` is
    `{"a": 0, "b": 1, "c": 1}`.
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = loads[0]
        owners[name] = rank
        heapq.heapreplace(loads, (load + sizes[name], rank))
    return owners
