"""Removes old rows of ended things, after `history_ttl`, and audit entries after `audit_ttl`.
Changes of workers' states stay for a week. Usage stays.

A run, its record and its steps stay while it has a checkpoint or a folder, because its row
describes them. A session stays while it has a run. Rows are deleted in small batches, so that other
writes wait only briefly."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from sqlalchemy import ColumnElement, Table, and_, bindparam, delete, exists, select, update

from gateway.identifiers import run_folder_name
from gateway.storage.database import Database
from gateway.storage.tables import (
    audit,
    checkpoints,
    custom_losses,
    jobs,
    operations,
    rollout_batches,
    run_records,
    runs,
    sampling_sessions,
    sessions,
    training_steps,
    trials,
    usage,
    weight_versions,
    worker_events,
    worker_use,
)
from tandem.telemetry import get_log

_AT_ONCE = 100
EVENTS_TTL = 7 * 86_400.0
"""Seconds that changes of workers' states stay."""


@dataclass(eq=False, kw_only=True)
class Retention:
    database: Database
    data_dir: Path
    history_ttl: float
    audit_ttl: float = 400 * 86_400.0

    async def remove_old(self) -> None:
        now = time.time()
        before, later = now - self.history_ttl, operations.alias()
        has_later = exists().where(
            later.c.run_id == operations.c.run_id, later.c.seq_id > operations.c.seq_id
        )
        active = select(runs.c.id).where(runs.c.state == "active")
        over = {
            # Keep calls for a replay, and each active run's newest operation, which marks its
            # position.
            operations: (operations.c.ended_at < before)
            & operations.c.call.is_(None)
            & (has_later | operations.c.run_id.not_in(active)),
            sampling_sessions: sampling_sessions.c.ended_at < before,
            weight_versions: weight_versions.c.collected_at < before,
            trials: trials.c.ended_at < before,
            worker_events: worker_events.c.at < now - EVENTS_TTL,
            audit: audit.c.at < now - self.audit_ttl,
        }
        removed = {table.name: await self._remove(table, which) for table, which in over.items()}
        removed["runs"] = await self._remove_runs(before)
        removed["sessions"] = await self._remove_sessions(before)
        if any(removed.values()):
            get_log().info("history_removed", **removed)

    async def _remove(self, table: Table, over: ColumnElement[bool]) -> int:
        keys = {f"old_{column.name}": column for column in table.primary_key}
        this = and_(*(column == bindparam(name) for name, column in keys.items()))
        old = select(*(column.label(name) for name, column in keys.items())).where(over)
        return await self.database.write_in_batches(delete(table).where(this), old)

    async def _remove_runs(self, before: float) -> int:
        unnamed = ~exists().where(checkpoints.c.run_id == runs.c.id)
        over = select(runs.c.id).where(runs.c.ended_at < before, unnamed).order_by(runs.c.id)
        removed, last = 0, ""
        while rows := await self.database.read(over.where(runs.c.id > last).limit(_AT_ONCE)):
            last = rows[-1]["id"]
            gone = await asyncio.to_thread(self._without_folder, [row["id"] for row in rows])
            for table in (training_steps, rollout_batches, run_records, jobs):
                await self._remove(table, table.c.run_id.in_(gone))
            gone = await asyncio.to_thread(self._remove_records, gone)
            await self.database.write_together(
                delete(runs).where(runs.c.id.in_(gone), unnamed),
                delete(weight_versions).where(
                    weight_versions.c.run_id.in_(gone),
                    ~exists().where(runs.c.id == weight_versions.c.run_id),
                ),
            )
            removed += len(gone)
        return removed

    def _without_folder(self, run_ids: list[str]) -> list[str]:
        roots = [self.data_dir / name for name in ("weights", "checkpoints")]
        return [
            run_id
            for run_id in run_ids
            if not any((root / run_folder_name(run_id)).exists() for root in roots)
        ]

    def _remove_records(self, run_ids: list[str]) -> list[str]:
        """Return the runs whose folders are gone. The rows of the others name what is left."""
        roots = [self.data_dir / name for name in ("runs", "jobs")]
        folders = {each: [root / run_folder_name(each) for root in roots] for each in run_ids}
        for folder in chain.from_iterable(folders.values()):
            shutil.rmtree(folder, ignore_errors=True)
        if left := [each for each in run_ids if any(one.exists() for one in folders[each])]:
            get_log().error("records_not_removed", runs=left)
        return [run_id for run_id in run_ids if run_id not in left]

    async def _remove_sessions(self, before: float) -> int:
        empty = ~exists().where(runs.c.session_id == sessions.c.id)
        over = select(sessions.c.id).where(sessions.c.ended_at < before, empty)
        project = select(sessions.c.project_id).where(sessions.c.id == usage.c.session_id)
        removed = 0
        while rows := await self.database.read(over.limit(_AT_ONCE)):
            ids = [row["id"] for row in rows]
            await self.database.write_together(
                update(usage)
                .where(usage.c.session_id.in_(ids))
                .values(project_id=project.scalar_subquery()),
                delete(custom_losses).where(custom_losses.c.session_id.in_(ids)),
                delete(sampling_sessions).where(sampling_sessions.c.session_id.in_(ids)),
                delete(worker_use).where(worker_use.c.session_id.in_(ids)),
                delete(sessions).where(sessions.c.id.in_(ids), empty),
            )
            removed += len(ids)
        return removed
