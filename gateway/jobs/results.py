"""The result of a job becomes a checkpoint and a weight version of its run.

Both get their rows in one transaction, with the run's training. A repeated import changes
nothing."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import update

from gateway.checkpoints.catalog import Checkpoint, CheckpointCatalog, insert_row
from gateway.checkpoints.versions import VersionStore, WeightVersion, insert_version
from gateway.identifiers import CheckpointPath, new_state_folder, relative_version_folder
from gateway.jobs.job import Job
from gateway.runs.record.store import RecordStore
from gateway.storage.database import Database
from gateway.storage.tables import runs
from tandem.weights import new_version_name
from tandem.weights.imported import Imported, ImportTargets, import_result

NAME = "final"
"""The name of the checkpoints of a job's result."""


def result_paths(run_id: str) -> tuple[CheckpointPath, CheckpointPath]:
    """Return the paths of a job's result: the trainer's state, and the weights for samplers."""
    return (
        CheckpointPath(run_id=run_id, kind="weights", name=NAME),
        CheckpointPath(run_id=run_id, kind="sampler_weights", name=NAME),
    )


@dataclass(eq=False, kw_only=True)
class ResultImporter:
    database: Database
    data_dir: Path
    checkpoints: CheckpointCatalog
    versions: VersionStore
    record: RecordStore

    async def import_result(self, job: Job) -> None:
        """Import a job's result once.

        Raises `CheckpointDamaged`, `LimitExceeded`, `StorageFull` or `StorageFailed`, and `OSError`
        for a failing disk. Then nothing is left of the import."""
        run_id, catalog = job.run_id, self.checkpoints
        if await catalog.find(result_paths(run_id)[0]) is not None:
            return
        source = job.folder / "result"
        expected = 2 * await asyncio.to_thread(_bytes_in, source)
        await catalog.check_quota(owner=job.owner, expected_bytes=expected)
        await self.versions.check_space(expected_bytes=expected, what="import the job's result")
        # A gateway that was killed in the middle left folders of the same names.
        suffix = hashlib.sha256(run_id.encode()).hexdigest()[:8]
        version = new_version_name(run_id=run_id, number=1, suffix=suffix)
        folder = new_state_folder(run_id=run_id, name=NAME, suffix=suffix)
        row = (await self.record.summaries([run_id]))[run_id]
        targets = ImportTargets(
            run_id=run_id,
            step=row.step or 0,
            version=version,
            version_path=self.data_dir / relative_version_folder(version),
            state_path=self.data_dir / folder,
        )
        with (
            catalog.pins.resolving(run_id),
            catalog.writing(folder, run_id=run_id),
            catalog.writing(relative_version_folder(version), run_id=run_id),
        ):
            imported = await asyncio.to_thread(
                import_result, source, Path(job.model.path), job.model.name, targets
            )
            await self._write_rows(job, targets, imported, folder)

    async def _write_rows(
        self, job: Job, targets: ImportTargets, imported: Imported, folder: str
    ) -> None:
        state, sampler = result_paths(job.run_id)
        named = Checkpoint(
            path=state,
            base_model=job.model.name,
            folder=folder,
            version="",
            step=targets.step,
            bytes=imported.state_bytes,
            optimizer=False,
            created_at=time.time(),
            owner=job.owner,
        )
        sampled = replace(
            named, path=sampler, folder="", version=targets.version, bytes=imported.version_bytes
        )
        version = WeightVersion(
            name=targets.version,
            path=str(targets.version_path),
            run_id=job.run_id,
            step=targets.step,
            base_model=job.model.name,
            adapter=imported.training.lora is not None,
            bytes=imported.version_bytes,
        )
        facts = {"training": imported.training.model_dump(), "newest": targets.version}
        await self.database.write_together(
            insert_row(named),
            insert_row(sampled),
            insert_version(version),
            update(runs).where(runs.c.id == job.run_id).values(facts),
            durable=True,
        )


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
