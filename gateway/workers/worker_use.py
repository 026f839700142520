"""Sums the use of each worker: its queue and run seconds, processors, devices and memory.

Seconds come from the changes of its row, everything else from its heartbeats. Sums are added to
`worker_use` every few seconds, so a killed gateway loses only the last interval."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from gateway.metrics import Metrics
from gateway.owners.usage.run_resources import WORKER_SUMS
from gateway.storage.database import Database
from gateway.storage.tables import worker_use
from gateway.workers.table import State, WorkerRow
from tandem.protocol.process_use import ProcessUse

_PEAKS = ("memory_peak", "gpu_peak", "gpu_memory_peak")
_COUNTED_AS: dict[State, str] = {
    "waiting": "queue_seconds",
    "placed": "queue_seconds",
    "starting": "start_seconds",
    "waking": "start_seconds",
    "awake": "run_seconds",
}


@dataclass
class _UseSums:
    """`at`: its seconds are counted until then. `process` said `use` in its last heartbeat, or None
    if only an earlier gateway heard one."""

    row: WorkerRow
    at: float
    process: str = ""
    use: ProcessUse | None = None
    added: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    peaks: dict[str, float] = field(default_factory=dict)

    def count_state(self, now: float, waited: float = 0.0) -> None:
        """Count the seconds of the present state. A sleeper queues while calls wait for it."""
        passed, self.at = max(0.0, now - self.at), now
        if self.row.state == "asleep":
            self.added["queue_seconds"] += min(passed, waited)
        elif name := _COUNTED_AS.get(self.row.state):
            self.added[name] += passed

    def count_use(self, process: str, use: ProcessUse) -> None:
        """Count the use since the last heartbeat of this process."""
        last = (self.use or use) if process == self.process else ProcessUse()
        self.process, self.use = process, use
        seconds = use.seconds - last.seconds
        self.added["measured_seconds"] += seconds
        self.added["cpu_seconds"] += use.cpu_seconds - last.cpu_seconds
        self._note_peak("memory_peak", use.memory_bytes)
        self._note_peak("gpu_memory_peak", use.gpu_bytes)
        # A sleeper's devices work for others.
        if use.gpu_seconds is not None and (self.row.state == "awake" or not use.shared):
            kind = "gpu_shared_seconds" if use.shared else "gpu_measured_seconds"
            self.added[kind] += seconds
            self.added["gpu_seconds"] += use.gpu_seconds - (last.gpu_seconds or 0.0)
            self._note_peak("gpu_peak", use.gpu_peak)

    def _note_peak(self, name: str, value: float | None) -> None:
        if value is not None:
            self.peaks[name] = max(self.peaks.get(name, 0.0), value)


class WorkerUseMeter:
    """`clock` returns seconds since 1970."""

    def __init__(self, *, database: Database, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._database = database
        self._metrics = metrics
        self._clock = clock
        self._insert_or_add = database.insert_or_add(worker_use, counters=WORKER_SUMS, peaks=_PEAKS)
        self._sums: dict[str, _UseSums] = {}

    def note_state(self, row: WorkerRow, waited: float) -> None:
        """Note a row's new state. The oldest waiting call has waited for `waited` seconds."""
        now = self._clock()
        sums = self._sums_of(row, now, process="" if row.state == "starting" else row.process)
        sums.count_state(now, waited)
        if row.state == "gone":
            self._write(self._sums.pop(row.key))
        else:
            sums.row = row

    def note_use(self, key: str, process: str, text: str) -> None:
        """Note the use in a process's heartbeat."""
        sums, use = self._sums.get(key), ProcessUse.parse(text)
        if sums is not None and use is not None:
            sums.count_use(process, use)

    def write(self, rows: Collection[WorkerRow]) -> None:
        """Add all sums to the table. `rows` are all rows, also those of an earlier gateway."""
        now = self._clock()
        for row in rows:
            sums = self._sums_of(row, now, process=row.process)
            if row.state != "asleep":  # counted when it wakes
                sums.count_state(now)
            self._write(sums)

    def _sums_of(self, row: WorkerRow, now: float, *, process: str) -> _UseSums:
        """Return the sums of a row. New ones belong to a row of an earlier gateway, which counted
        the use of its `process` until now."""
        return self._sums.setdefault(row.key, _UseSums(row, now, process))

    def _write(self, sums: _UseSums) -> None:
        added, sums.added = sums.added, defaultdict(float)
        if not any(added.values()):
            return
        row = sums.row
        for state in ("queue", "start", "run"):
            self._metrics.worker_seconds.labels(row.kind, state).inc(added[f"{state}_seconds"])
        values: dict[str, object] = {
            "key": row.key,
            "kind": row.kind,
            "session_id": row.session,
            **{name: added[name] for name in WORKER_SUMS},
            **{name: sums.peaks.get(name) for name in _PEAKS},
        }
        self._database.write_soon(self._insert_or_add, values)
