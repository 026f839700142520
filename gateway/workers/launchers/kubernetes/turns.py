"""Whose pods are made next.

Pods that are bound to a claim at once are in each other's way (the scheduler's writes to it
conflict), so that the next is made when the last was scheduled, or waits for something else, as
after `_PATIENCE` seconds.

Two workers with several pods each could have some of them on the last nodes, and wait for those of
the other: so one such worker of a pool at a time has pods that wait for a node.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence

_PATIENCE = 5.0


class Turns:
    """`next_turn` is called with the id of a worker whose turn it may be now."""

    def __init__(self, next_turn: Callable[[str], None]) -> None:
        self._next_turn = next_turn
        self._pods: defaultdict[str, dict[str, float]] = defaultdict(dict)
        """By claim, those that are to be scheduled on it, and since when."""
        self._queued: defaultdict[str, set[str]] = defaultdict(set)
        """By claim, the workers that wait until it is their turn."""
        self._workers: defaultdict[str, dict[str, None]] = defaultdict(dict)
        """By pool, those with several pods that are to be scheduled: it is the first one's turn."""

    def take(self, pod: str, claims: Sequence[str], *, worker_id: str) -> str:
        """Take the turn of a pod on its claims, and return ""; or the name of a pod before it."""
        earliest = asyncio.get_running_loop().time() - _PATIENCE
        for claim in claims:
            for other, since in self._pods.get(claim, {}).items():
                if other != pod and since > earliest:
                    self._queued[claim].add(worker_id)
                    return other
        self.note(pod, claims)
        return ""

    def note(self, pod: str, claims: Sequence[str]) -> None:
        """Note that a pod is to be scheduled on its claims."""
        for claim in claims:
            self._pods[claim].setdefault(pod, asyncio.get_running_loop().time())

    def give(self, pod: str) -> None:
        """Note that a pod is scheduled, or will not be."""
        for claim in [each for each, pods in self._pods.items() if pod in pods]:
            del self._pods[claim][pod]
            if not self._pods[claim]:
                del self._pods[claim]
            for worker_id in self._queued.pop(claim, ()):
                self._next_turn(worker_id)

    def take_of_pool(self, worker_id: str, pool: str) -> str:
        """Take the turn of a worker with several pods among those of its pool, and return ""; or
        the id of the one whose turn it is."""
        workers = self._workers[pool]
        workers.setdefault(worker_id)
        first = next(iter(workers))
        return "" if first == worker_id else first

    def give_of_pool(self, worker_id: str, pool: str) -> None:
        """Note that all pods of a worker are scheduled, or will not be."""
        workers = self._workers.get(pool, {})
        if worker_id not in workers:
            return
        del workers[worker_id]
        if workers:
            self._next_turn(next(iter(workers)))
        else:
            del self._workers[pool]
