"""The metrics of workers: waits, turns and switches of each group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gateway.metrics import Metrics
from gateway.workers.overview import Overview
from gateway.workers.table import WorkerRow


class WorkerMetrics:
    """Counts waits, turns and switches for Prometheus."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._held_since: dict[str, float] = {}

    def note_state(self, before: WorkerRow | None, after: WorkerRow, waited: float) -> None:
        """Note another state of a row. Its calls have waited for `waited` seconds."""
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
        """Compute the gauges of groups at each scrape, from one overview."""

        def gauges() -> dict[str, dict[str, float]]:
            seen = overview()
            return {name: _gauges(seen, seen.on(seen.groups[name])) for name in groups}

        self._metrics.watch_groups(gauges)


def _gauges(overview: Overview, rows: Sequence[WorkerRow]) -> dict[str, float]:
    sizes = [overview.bytes_of(row) for row in rows]
    return {
        "lease_holders": sum(row.occupies for row in rows),
        "lease_waiters": sum(overview.demand_of(row).waiting > 0 for row in rows),
        "resident_bytes": sum(each.device for each in sizes),
        "sleeping_bytes": sum(each.host for each in sizes),
        "sleeping_disk_bytes": sum(each.disk for each in sizes),
    }
