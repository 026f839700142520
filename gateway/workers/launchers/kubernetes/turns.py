"""The order in which pods are created.

The scheduler's writes conflict for pods that reach one claim together. So the next pod waits until
the last was scheduled, for at most `_PATIENCE` seconds. Two workers with several pods could each
hold some of the last nodes and wait for the rest. So only one such worker of a pool has unscheduled
pods."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence

_PATIENCE = 5.0


class Turns:
    """`next_turn` gets the id of a worker that may have its turn now."""

    def __init__(self, next_turn: Callable[[str], None]) -> None:
        self._next_turn = next_turn
        self._pods: defaultdict[str, dict[str, float]] = defaultdict(dict)
        """By claim: unscheduled pods, and when they began to wait."""
        self._queued: defaultdict[str, set[str]] = defaultdict(set)
        self._workers: defaultdict[str, dict[str, None]] = defaultdict(dict)
        """By pool: unscheduled workers with several pods. The first has its turn."""

    def take(self, pod: str, claims: Sequence[str], *, worker_id: str) -> str:
        """Take a pod's turn on its claims and return "", or return the name of the pod
        before it."""
        earliest = asyncio.get_running_loop().time() - _PATIENCE
        for claim in claims:
            for other, since in self._pods.get(claim, {}).items():
                if other != pod and since > earliest:
                    self._queued[claim].add(worker_id)
                    return other
        self.note(pod, claims)
        return ""

    def note(self, pod: str, claims: Sequence[str]) -> None:
        for claim in claims:
            self._pods[claim].setdefault(pod, asyncio.get_running_loop().time())

    def give(self, pod: str) -> None:
        for claim in [each for each, pods in self._pods.items() if pod in pods]:
            del self._pods[claim][pod]
            if not self._pods[claim]:
                del self._pods[claim]
            for worker_id in self._queued.pop(claim, ()):
                self._next_turn(worker_id)

    def take_of_pool(self, worker_id: str, pool: str) -> str:
        """Take the turn of a worker with several pods in its pool and return "", or the id of the
        worker before."""
        workers = self._workers[pool]
        workers.setdefault(worker_id)
        first = next(iter(workers))
        return "" if first == worker_id else first

    def give_of_pool(self, worker_id: str, pool: str) -> None:
        workers = self._workers.get(pool, {})
        if worker_id not in workers:
            return
        del workers[worker_id]
        if workers:
            self._next_turn(next(iter(workers)))
        else:
            del self._workers[pool]
