"""How long to wait before a worker that failed is started again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_FIRST_WAIT = 0.5
_JITTER = 0.2


@dataclass
class Backoff:
    """Durations in seconds. The waits are about 0.5, 1, 2, 4, … 30, 30, each made shorter by up to
    a fifth, so that workers which failed together do not start together. After one that has done
    some work they begin anew: what ended it then is not what kept those before from it."""

    cap: float = 30.0
    uniform: Callable[[], float] = random.random
    failures: int = 0

    def worked(self) -> None:
        """Note that the worker has done what it was started for."""
        self.failures = 0

    def failed(self) -> float:
        """Note that the worker failed or could not be started; return how long to wait."""
        wait = min(self.cap, _FIRST_WAIT * 2.0 ** min(self.failures, 32))
        self.failures += 1
        return wait * (1 - _JITTER * self.uniform())
