"""Requests that strangers send: metrics count them, and limited log lines name some."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import prometheus_client

from tandem.telemetry import get_log

_INTERVAL = 60.0
_NAMED_ADDRESSES = 10


@dataclass(eq=False)
class CountedLines:
    """Logs the first event at once as `first`, and the next minute's events as one line `more` with
    their number, so that they cannot fill the disk. `counter` counts all by their reason."""

    counter: prometheus_client.Counter
    first: str
    more: str
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._logged_at: float | None = None
        self._reasons: Counter[str] = Counter()
        self._addresses: set[str] = set()
        self._log = get_log()

    def note(self, *, reason: str, address: str, **about: str) -> None:
        self.counter.labels(reason=reason).inc()
        if self._logged_at is None:
            self._logged_at = self.clock()
            self._log.warning(self.first, reason=reason, address=address, **about)
            return
        self._reasons[reason] += 1
        if len(self._addresses) < _NAMED_ADDRESSES:
            self._addresses.add(address)

    def write(self, *, closing: bool = False) -> None:
        now = self.clock()
        if self._logged_at is None:
            return
        if now - self._logged_at < _INTERVAL and not closing:
            return
        if not self._reasons:
            self._logged_at = None
            return
        self._log.warning(
            self.more,
            count=self._reasons.total(),
            seconds=round(now - self._logged_at),
            reasons=dict(self._reasons),
            addresses=sorted(self._addresses),
        )
        self._logged_at = now
        self._reasons.clear()
        self._addresses.clear()
