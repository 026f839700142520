"""`DATA/runs/RUN/record/run.json`: a copy of a run's row for readers without a gateway."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select

from gateway.runs.record.files import record_folder
from gateway.storage.data_directory import write_file
from gateway.storage.database import Database
from gateway.storage.tables import runs
from tandem.errors import StorageFailed, describe
from tandem.telemetry import get_log

_COLUMNS = (
    runs.c.id,
    runs.c.session_id,
    runs.c.name,
    runs.c.tags,
    runs.c.config,
    runs.c.user_metadata,
    runs.c.parent_run,
    runs.c.parent_step,
    runs.c.base_model,
    runs.c.training,
    runs.c.owner,
    runs.c.project_id,
    runs.c.state,
    runs.c.error_type,
    runs.c.reason,
    runs.c.created_at,
    runs.c.ended_at,
)


@dataclass(eq=False)
class IdentityFiles:
    """Writes a file soon after its row has changed. A failed write is repeated with the next
    change of any run."""

    database: Database
    data_dir: Path

    def __post_init__(self) -> None:
        self._changed: set[str] = set()
        self._writing: asyncio.Task[None] | None = None

    def write_soon(self, run_id: str) -> None:
        """The change is already in the queue of the database."""
        self._changed.add(run_id)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_changed(), name="run-json")

    async def close(self) -> None:
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write_changed(self) -> None:
        failed = set()
        try:
            while self._changed:
                run_id = self._changed.pop()
                try:
                    await self._write(run_id)
                except (OSError, StorageFailed) as error:
                    failed.add(run_id)
                    get_log().error("run_json_not_written", run_id=run_id, reason=describe(error))
        finally:  # at once, so that the next change begins a new task
            self._changed |= failed
            self._writing = None

    async def _write(self, run_id: str) -> None:
        await self.database.flush()
        row = await self.database.read_one(select(*_COLUMNS).where(runs.c.id == run_id))
        if row is not None:
            path = record_folder(self.data_dir, run_id) / "run.json"
            content = json.dumps(dict(row), indent=2).encode()
            await asyncio.to_thread(write_file, path, content, synced=True)
