"""Copies a job's metrics from its files into the record, each line once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from sqlalchemy import select

from gateway.jobs.files import read_metrics
from gateway.jobs.job import Job
from gateway.runs.record.files import Place
from gateway.runs.record.metrics import MetricsRow
from gateway.runs.record.rows import RunRecords
from gateway.runs.record.store import RecordStore
from gateway.storage.tables import runs

_Key = tuple[int, tuple[tuple[str, float | str], ...]]


class JobProgress:
    """A gateway that takes over reads an attempt's file from the beginning, and leaves the lines
    out that the record has."""

    def __init__(self, job: Job, *, record: RecordStore, records: RunRecords) -> None:
        self._job, self._record, self._records = job, record, records
        self._attempt = self._offset = 0
        self._steps: int | None = None
        self._known: set[_Key] | None = None

    async def read_on(self) -> None:
        """Write the lines until now. Raises `OSError` and `StorageFailed`."""
        job = self._job
        if self._attempt != job.attempt:
            self._attempt, self._offset = job.attempt, 0
        while True:
            found = await asyncio.to_thread(read_metrics, job.folder, job.attempt, self._offset)
            if found.offset == self._offset:
                return
            if self._known is None:
                self._known = await self._recorded()
            if rows := [row for row in found.rows if _key(row) not in self._known]:
                await self._record.append_metrics(job.run_id, rows, "tandem")
            self._offset = found.offset
            if found.steps is not None and found.steps != self._steps:
                await self._note_steps(found.steps)
                self._steps = found.steps

    async def _recorded(self) -> set[_Key]:
        """Return the server's rows of the record, which an earlier gateway wrote."""
        found, place = set[_Key](), Place()
        while True:
            rows, end = await self._record.rows_after(self._job.run_id, place, only_server=True)
            found.update(map(_key, rows))
            if end == place:
                return found
            place = end

    async def _note_steps(self, steps: int) -> None:
        """Write the number of steps into the run's configuration. Percent and remaining seconds
        follow from it."""
        query = select(runs.c.config).where(runs.c.id == self._job.run_id)
        row = await self._records.database.read_one(query)
        config: Mapping[str, object] = (row["config"] if row is not None else None) or {}
        change = {"config": {**config, "total_steps": steps}}
        await self._records.change(self._job.run_id, change)


def _key(row: MetricsRow) -> _Key:
    return row.step, tuple(sorted(row.values.items()))
