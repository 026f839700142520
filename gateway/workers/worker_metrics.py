"""The metrics of workers: waits, turns and switches of each group."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gateway.metrics import Metrics
from gateway.workers.overview import Overview, WorkerBytes
from gateway.workers.table import WorkerRow


class WorkerMetrics:
    """Implements `Observer` for Prometheus."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._held_since: dict[str, float] = {}

    def note_state(self, before: WorkerRow | None, after: WorkerRow, waited: float) -> None:
        if after.state == "awake" and waited:
            self._metrics.lease_wait_seconds.labels(after.group).observe(waited)
        if after.occupies:
            self._held_since.setdefault(after.key, after.since)
        elif (since := self._held_since.pop(after.key, None)) is not None and before is not None:
            self._metrics.lease_hold_seconds.labels(before.group).observe(after.since - since)

    def note_switch(self, row: WorkerRow, direction: str, seconds: float, moved: int) -> None:
        self._metrics.switch_seconds.labels(row.group, row.kind, direction).observe(seconds)
        self._metrics.moved_bytes.labels(row.group, direction).inc(moved)

    def note_refusal(self, row: WorkerRow) -> None:
        self._metrics.sleeps_refused.labels(row.group).inc()

    def watch(self, groups: Iterable[str], overview: Callable[[], Overview]) -> None:
        """Compute the gauges of groups at each scrape."""
        for name in groups:
            self._metrics.watch_group(name, _gauges(name, overview))


def _gauges(name: str, overview: Callable[[], Overview]) -> dict[str, Callable[[], float]]:
    def count(part: Callable[[Overview, WorkerRow], bool]) -> int:
        seen = overview()
        return sum(part(seen, row) for row in seen.rows.values() if row.group == name)

    def total(part: Callable[[WorkerBytes], int]) -> float:
        seen = overview()
        return sum(part(seen.bytes_of(row)) for row in seen.rows.values() if row.group == name)

    return {
        "lease_holders": lambda: count(lambda _, row: row.occupies),
        "lease_waiters": lambda: count(lambda seen, row: seen.demand_of(row).waiting > 0),
        "resident_bytes": lambda: total(lambda said: said.device),
        "sleeping_bytes": lambda: total(lambda said: said.host),
        "sleeping_disk_bytes": lambda: total(lambda said: said.disk),
    }
