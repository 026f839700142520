"""The wait before a failed worker is started again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_FIRST_WAIT = 0.5
_JITTER = 0.2


@dataclass
class Backoff:
    """Waits of about 0.5, 1, 2, 4, … 30, 30 seconds until work is done. Each is up to a fifth
    shorter at random, so that workers that failed together start apart."""

    cap: float = 30.0
    uniform: Callable[[], float] = random.random
    failures: int = 0

    def worked(self) -> None:
        self.failures = 0

    def failed(self) -> float:
        """Note a failure and return the wait in seconds."""
        wait = min(self.cap, _FIRST_WAIT * 2.0 ** min(self.failures, 32))
        self.failures += 1
        return wait * (1 - _JITTER * self.uniform())
