"""How long to wait before a worker that failed is started again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class BackoffPolicy:
    """Durations in seconds.

    Literal example: with the defaults the waits are about 0.5, 1, 2, 4, … 30, 30, each made
    shorter by up to a fifth, so that workers which failed together do not start together.
    """

    first: float = 0.5
    factor: float = 2.0
    cap: float = 30.0
    jitter: float = 0.2
    stable_after: float = 60.0


class Backoff:
    """Counts the failures in a row of one worker. Pure: it neither sleeps nor starts.

    Literal use: `await asyncio.sleep(backoff.failed())`, start the worker again, and then
    `backoff.ready()`. A worker that stayed ready for `stable_after` has earned a fresh start.
    """

    def __init__(
        self,
        policy: BackoffPolicy | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._policy = policy if policy is not None else BackoffPolicy()
        self._clock = clock
        self._uniform = uniform
        self._failures = 0
        self._ready_at: float | None = None

    @property
    def failures(self) -> int:
        """Failures in a row, without a stable period between them."""
        return self._failures

    def ready(self) -> None:
        """The worker serves from now on."""
        self._ready_at = self._clock()

    def failed(self) -> float:
        """The worker failed or could not be started: how many seconds to wait now."""
        policy = self._policy
        since = self._ready_at
        if since is not None and self._clock() - since >= policy.stable_after:
            self._failures = 0
        self._ready_at = None
        wait = policy.first
        for _ in range(self._failures):  # not a power: that overflows after a thousand failures
            wait = min(policy.cap, wait * policy.factor)
            if wait == policy.cap:
                break
        self._failures += 1
        return min(policy.cap, wait) * (1 - policy.jitter * self._uniform())
