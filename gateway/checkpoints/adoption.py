"""Takes checkpoints back that are on the disk and of which the database knows nothing.

Their rows, and those of their run and session, are made again from what they say of themselves
(`records.py`). They belong to their owner as before; they are not published and do not expire,
since a record does not say that. The run has ended.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Executable, delete, insert, select

from gateway.checkpoints.catalog import Checkpoint, CheckpointCatalog, insert_row
from gateway.checkpoints.collector import GarbageCollector
from gateway.checkpoints.records import CheckpointRecord
from gateway.checkpoints.versions import FILE_LISTS, WeightVersion, files_of, insert_version
from gateway.identifiers import make_checkpoint_path, run_folder_name
from gateway.storage.database import Database
from gateway.storage.pairing import pair
from gateway.storage.tables import checkpoints, runs, sessions, weight_versions
from tandem.errors import CheckpointDamaged, NameTaken, SessionFinished, TandemError, describe
from tandem.weights import Manifest
from tandem.weights.manifest import MANIFEST_NAME
from tandem.weights.store import read_record, sync_name

_REASON = "its database was lost; its checkpoints were taken back from the disk"


@dataclass(frozen=True)
class Adoption:
    """The paths of the checkpoints that were taken back; and, by folder, why others were not."""

    adopted: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


class CheckpointAdopter:
    def __init__(
        self,
        *,
        database: Database,
        data_dir: Path,
        checkpoints: CheckpointCatalog,
        collector: GarbageCollector,
    ) -> None:
        self._database = database
        self._data_dir = data_dir
        self._pins = checkpoints.pins
        self._collector = collector
        self._quarantine = collector.quarantine
        self._lock = asyncio.Lock()

    async def adopt(self) -> Adoption:
        """Take back what can be, the newest of each name; from then on, database and data
        directory belong together. Idempotent."""
        async with self._lock:
            done = Adoption()
            folders = await self._collector.unknown_folders()
            found = await asyncio.to_thread(self._read, folders, done)
            for folder, checkpoint, record in found:
                try:
                    await self._take_back(folder, checkpoint, record)
                    done.adopted.append(str(checkpoint.path))
                except (TandemError, OSError) as error:
                    done.refused[folder] = describe(error)
            await pair(self._database, self._data_dir)
            self._collector.paired = True
            return done

    def _read(
        self, folders: list[str], done: Adoption
    ) -> list[tuple[str, Checkpoint, CheckpointRecord]]:
        """Return the whole ones, newest first; note why the others are not taken back."""
        found = []
        for folder in folders:
            try:
                record = CheckpointRecord.read(self._place(folder))
                checkpoint = self._checkpoint(folder, record)
                files = files_of(checkpoint, self._place(folder))
                size = sum(f.stat().st_size for name, f in files.items() if name not in FILE_LISTS)
                if size != record.bytes:
                    raise CheckpointDamaged(f"it has {size} bytes, not {record.bytes}")
                found.append((folder, checkpoint, record))
            except (TandemError, OSError) as error:
                done.refused[folder] = describe(error)
        return sorted(found, key=lambda item: -item[1].created_at)

    def _place(self, folder: str) -> Path:
        """Return where a folder is now."""
        quarantined = self._quarantine.path(folder)
        return quarantined if quarantined.exists() else self._data_dir / folder

    def _checkpoint(self, folder: str, record: CheckpointRecord) -> Checkpoint:
        path = make_checkpoint_path(run_id=record.run_id, kind=record.kind, name=record.name)
        root, run, leaf = folder.split("/")
        is_state = record.kind == "weights"
        if run != run_folder_name(record.run_id) or is_state != (root == "checkpoints"):
            raise CheckpointDamaged(f"it says that it is {path}, which cannot be in this folder")
        return Checkpoint(
            path=path,
            base_model=record.base_model,
            folder=folder if is_state else "",
            version="" if is_state else f"{record.run_id}/{leaf}",
            step=record.step,
            bytes=record.bytes,
            optimizer=is_state,
            created_at=record.created_at,
            owner=record.owner,
            user_metadata=record.user_metadata,
        )

    async def _take_back(
        self, folder: str, checkpoint: Checkpoint, record: CheckpointRecord
    ) -> None:
        """Move the files to their place, if they are in quarantine, and write the rows."""
        path, read = checkpoint.path, self._database.read_one
        if await read(select(checkpoints.c.path).where(checkpoints.c.path == str(path))):
            raise NameTaken(f"there is another checkpoint {path}; delete it to take this one back")
        statements: list[Executable] = [insert_row(checkpoint)]
        about = {
            "owner": record.owner,
            "project_id": record.project_id,
            "created_at": record.created_at,
            "ended_at": time.time(),
        }
        session_id = path.run_id.partition(":")[0]
        if not await read(select(sessions.c.id).where(sessions.c.id == session_id)):
            statements.append(
                insert(sessions).values(
                    id=session_id, state="finished", reason="success", detail=_REASON, **about
                )
            )
        if not await read(select(runs.c.id).where(runs.c.id == path.run_id)):
            statements.append(
                insert(runs).values(
                    id=path.run_id,
                    session_id=session_id,
                    base_model=record.base_model,
                    training=record.training.model_dump(),
                    state="ended",
                    error_type=SessionFinished.type,
                    reason=_REASON,
                    **about,
                )
            )
        with self._pins.pinned(folder):
            version = await asyncio.to_thread(self._restore_files, folder, checkpoint)
            if version is not None:
                old = delete(weight_versions).where(weight_versions.c.name == version.name)
                statements += [old, insert_version(version)]
            await self._database.write_together(*statements, durable=True)

    def _restore_files(self, folder: str, checkpoint: Checkpoint) -> WeightVersion | None:
        """Return the weight version that the folder holds, if it does."""
        path = self._data_dir / folder
        if self._quarantine.path(folder).exists():
            self._quarantine.take_back(folder)
        if not path.is_dir():
            raise CheckpointDamaged("it was put away meanwhile; adopt once more")
        sync_name(path)  # which a gateway that was killed may not have done
        if not checkpoint.version:
            return None
        manifest = Manifest.model_validate_json(read_record(path / MANIFEST_NAME))
        return WeightVersion(
            name=checkpoint.version,
            path=str(path),
            run_id=checkpoint.path.run_id,
            step=checkpoint.step,
            base_model=checkpoint.base_model,
            adapter=manifest.adapter,
            parent=manifest.parent,
            bytes=checkpoint.bytes,
            created_at=checkpoint.created_at,
        )
