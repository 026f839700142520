"""How many rollouts run at a time: as many as the engines compute without a queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.rl.policy import Policy
from tandem.rl.server import EngineLoad

FULL = 0.9
"""The used share of the KV cache from which no rollout is added."""

_FIRST = 64
_LEAST = 8
_SHRINK = 0.75
_SLOW = 2.0
"""How much slower than the fastest a token of another server may be."""
_SECONDS = 2.0


class Concurrency:
    """Bounds rollouts by a limit that moves between `_LEAST` and `largest`.

    The limit grows by a constant and shrinks by a factor, as in TCP. Until it shrinks for the first
    time, it doubles, also with each round of finished rollouts. It grows only while it is used."""

    def __init__(self, largest: int, *, first: int = _FIRST) -> None:
        self.limit = min(first, largest)
        self.running = 0
        self._largest = largest
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._starting = self._room = True
        self._fastest: float | None = None
        self._newest: float | None = None

    @asynccontextmanager
    async def rollouts(self, count: int) -> AsyncIterator[None]:
        """Wait, in the order of calls, until `count` more rollouts may run, and hold their
        places."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        self._admit()
        try:
            await turn
        except BaseException:
            self._waiting = deque(each for each in self._waiting if each[1] is not turn)
            if turn.done() and not turn.cancelled():
                self._free(count)
            raise
        try:
            yield
            if self._starting and self._room and self._waiting:
                self.limit = min(self.limit + count, self._largest)
        finally:
            self._free(count)

    def note_latency(self, seconds: float, tokens: int) -> None:
        """Take the duration of a request whose longest answer has `tokens` tokens."""
        each = seconds / max(tokens, 1)
        self._newest = each if self._newest is None else 0.8 * self._newest + 0.2 * each
        self._fastest = each if self._fastest is None else min(self._fastest, each)

    def adapt(self, load: EngineLoad | None) -> None:
        """Move the limit by the load of the engines, or by the latency without one."""
        if load is not None:
            crowded, self._room = load.waiting > 0, load.kv_used < FULL
        elif self._newest is None or self._fastest is None:
            return
        else:
            crowded = self._newest > _SLOW * self._fastest
            self._room = not crowded
        if crowded:
            self._starting = False
            self.limit = max(int(self.limit * _SHRINK), min(_LEAST, self._largest))
        elif self._room and self._waiting:
            grown = self.limit + (self.limit if self._starting else _FIRST // 2)
            self.limit = min(grown, self._largest)
        self._admit()

    async def follow(self, policy: Policy) -> None:
        """Move the limit every two seconds, until cancelled."""
        while True:
            await asyncio.sleep(_SECONDS)
            self.adapt(await policy.load())

    def _free(self, count: int) -> None:
        self.running -= count
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            count, turn = self._waiting[0]
            if self.running and self.running + count > self.limit:
                return
            self._waiting.popleft()
            if not turn.done():
                self.running += count
                turn.set_result(None)
