"""What other threads hand to the engine's: work, cancellations, and the wish to stop."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from sampler_service.work import Waiter
from tandem.errors import TandemError, WorkerDied

_GATHER_QUIET = 0.001
_GATHER_MOST = 0.050


@dataclass(frozen=True)
class Arrivals:
    """What came since the last look. `cancelled` are ids of requests."""

    waiters: list[Waiter]
    cancelled: frozenset[str]


class Inbox:
    """`put`, `cancel`, `stop` and `len` from any thread; `take`, `wait` and `close` from the one
    that reads it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiters: list[Waiter] = []
        self._cancelled: list[str] = []
        self._stopped = False
        self._refusal: TandemError | None = None

    def __len__(self) -> int:
        return len(self._waiters)

    def put(self, waiter: Waiter) -> TandemError | None:
        """Returns why it is not taken; None when it is."""
        with self._condition:
            if self._refusal is None and not self._stopped:
                self._waiters.append(waiter)
                self._condition.notify()
                return None
            return self._refusal or WorkerDied("the sampler is stopping")

    def cancel(self, request_id: str) -> None:
        with self._condition:
            self._cancelled.append(request_id)
            self._condition.notify()

    def stop(self) -> None:
        with self._condition:
            self._stopped = True
            self._condition.notify()

    def take(self) -> Arrivals | None:
        """What is there now; None once it was stopped."""
        with self._condition:
            if self._stopped:
                return None
            waiters, self._waiters = self._waiters, []
            cancelled, self._cancelled = self._cancelled, []
        return Arrivals(waiters=waiters, cancelled=frozenset(cancelled))

    def wait(self) -> Arrivals | None:
        """The same, when there is something. The process ends with `stop`, so there is no
        deadline."""
        with self._condition:
            self._condition.wait_for(lambda: self._waiters or self._cancelled or self._stopped)
        self._gather()
        return self.take()

    def close(self, refusal: TandemError) -> list[Waiter]:
        """Refuses everything from now on; returns what nobody has taken."""
        with self._condition:
            self._refusal = refusal
            waiters, self._waiters = self._waiters, []
        return waiters

    def _gather(self) -> None:
        """Lets a burst of requests arrive before the first step of an idle engine: a step costs
        nearly the same for one request and for fifty. Sleeps, so as not to be woken by each."""
        until = time.monotonic() + _GATHER_MOST
        seen = 0
        while seen != len(self._waiters) and time.monotonic() < until:
            seen = len(self._waiters)
            time.sleep(_GATHER_QUIET)
