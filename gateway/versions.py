"""What the database knows of weight versions and checkpoints, and their collection."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import RowMapping, delete, insert, select, update

from gateway.database import Database
from gateway.names import CheckpointPath, checkpoint_folder, parse_checkpoint_path
from gateway.tables import checkpoints, sampling_sessions, weight_versions
from tandem.errors import StorageFull, UnknownWeights
from tandem.v1 import common_pb2
from tandem.weights import collect, sweep_partials, version_path


@dataclass(frozen=True)
class Version:
    """A published weight version, or a base model's (`base/NAME`). `path` is its folder."""

    name: str
    path: str
    run_id: str
    step: int
    base_model: str

    def to_proto(self) -> common_pb2.WeightVersion:
        return common_pb2.WeightVersion(
            name=self.name, path=self.path, run_id=self.run_id, step=self.step
        )


@dataclass(frozen=True)
class Checkpoint:
    """A named save: a folder with optimizer state (`weights`), or a version
    (`sampler_weights`)."""

    path: CheckpointPath
    base_model: str
    folder: str
    version: str
    step: int
    bytes: int
    optimizer: bool
    created_at: float


class Versions:
    def __init__(self, *, database: Database, data_dir: Path, min_free_bytes: int) -> None:
        self._database = database
        self._data_dir = data_dir
        self._min_free_bytes = min_free_bytes

    async def check_space(self, *, expected_bytes: int, what: str) -> None:
        """Raises `StorageFull` before anything is written."""
        free = (await asyncio.to_thread(shutil.disk_usage, self._data_dir)).free
        if free < self._min_free_bytes + expected_bytes:
            raise StorageFull(
                f"there is no room to {what}: {free} bytes are free in the data directory, "
                f"{expected_bytes} are needed and {self._min_free_bytes} are kept free; "
                "what was served before goes on being served"
            )

    async def add_version(self, version: Version, *, parent: str, size: int) -> None:
        await self._database.write(
            insert(weight_versions),
            {
                "name": version.name,
                "run_id": version.run_id,
                "base_model": version.base_model,
                "path": version.path,
                "parent": parent,
                "step": version.step,
                "bytes": size,
                "created_at": time.time(),
            },
        )

    async def version(self, name: str) -> Version:
        """Raises `UnknownWeights` for one that never was or was collected."""
        row = await self._database.read_one(
            select(weight_versions).where(
                weight_versions.c.name == name, weight_versions.c.collected_at.is_(None)
            )
        )
        if row is None:
            raise UnknownWeights(f"there is no weight version {name!r}")
        return Version(
            name=row["name"],
            path=row["path"],
            run_id=row["run_id"],
            step=row["step"],
            base_model=row["base_model"],
        )

    async def put_checkpoint(
        self,
        checkpoint: Checkpoint,
        *,
        ttl_seconds: int | None,
        user_metadata: Mapping[str, str] | None,
    ) -> None:
        """Writes the row; one of the same path gives way."""
        await self._database.write(
            delete(checkpoints).where(checkpoints.c.path == str(checkpoint.path))
        )
        await self._database.write(
            insert(checkpoints),
            {
                "path": str(checkpoint.path),
                "run_id": checkpoint.path.run_id,
                "kind": checkpoint.path.kind,
                "base_model": checkpoint.base_model,
                "folder": checkpoint.folder,
                "version": checkpoint.version,
                "step": checkpoint.step,
                "bytes": checkpoint.bytes,
                "optimizer": checkpoint.optimizer,
                "user_metadata": dict(user_metadata) if user_metadata is not None else None,
                "created_at": checkpoint.created_at,
                "expires_at": checkpoint.created_at + ttl_seconds if ttl_seconds else None,
            },
        )

    async def find_checkpoint(self, path: CheckpointPath) -> Checkpoint | None:
        row = await self._database.read_one(
            select(checkpoints).where(checkpoints.c.path == str(path))
        )
        return _checkpoint(row) if row is not None else None

    async def checkpoint(self, path: str) -> Checkpoint:
        """Raises `UnknownWeights`, or `InvalidRequest` for what is no checkpoint path."""
        found = await self.find_checkpoint(parse_checkpoint_path(path))
        if found is None:
            raise UnknownWeights(f"there is no checkpoint {path!r}")
        return found

    async def list_checkpoints(self, *, run_id: str) -> list[Checkpoint]:
        """Those of a run, oldest first."""
        rows = await self._database.read(
            select(checkpoints)
            .where(checkpoints.c.run_id == run_id)
            .order_by(checkpoints.c.created_at)
        )
        return [_checkpoint(row) for row in rows]

    async def training_checkpoint(self, path: str) -> Checkpoint:
        """One that a trainer can load. Raises `UnknownWeights`."""
        found = await self.checkpoint(path)
        if found.path.kind != "weights":
            raise UnknownWeights(
                f"{path!r} holds weights for sampling alone; a trainer loads what save_state "
                "wrote (tinker://RUN/weights/NAME)"
            )
        return found

    async def remove_folder(self, folder: str) -> None:
        """Removes the folder of a checkpoint that nothing names any more."""
        if folder:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def expire_checkpoints(self) -> None:
        """Removes the checkpoints whose time is over."""
        rows = await self._database.read(
            select(checkpoints).where(checkpoints.c.expires_at < time.time())
        )
        for row in rows:
            await self._database.write(delete(checkpoints).where(checkpoints.c.path == row["path"]))
            await self.remove_folder(row["folder"])

    async def collect(self, *, run_id: str, keep: set[str]) -> list[str]:
        """Removes a run's versions that nothing names: no sampling session, no checkpoint, and
        not `keep` (what is being published, loaded or sampled from)."""
        await self._database.flush()
        named = await self._database.read(
            select(sampling_sessions.c.version).where(
                sampling_sessions.c.run_id == run_id, sampling_sessions.c.state == "active"
            )
        )
        saved = await self._database.read(
            select(checkpoints.c.version).where(checkpoints.c.run_id == run_id)
        )
        kept = keep | {row["version"] for row in named} | {row["version"] for row in saved}
        removed = await asyncio.to_thread(collect, self._data_dir, run_id=run_id, keep=kept)
        if removed:
            self._database.write_soon(
                update(weight_versions)
                .where(weight_versions.c.name.in_(removed))
                .values(collected_at=time.time())
            )
        return removed

    async def sweep_run(self, run_id: str) -> None:
        """Removes what an interrupted publish or save left. Only when the trainer is gone."""
        await self._database.flush()
        kept = {checkpoint.folder for checkpoint in await self.list_checkpoints(run_id=run_id)}

        def sweep() -> None:
            sweep_partials(self._data_dir, run_id=run_id)
            parent = checkpoint_folder(self._data_dir, run_id=run_id, name="x").parent
            for folder in parent.iterdir() if parent.is_dir() else ():
                if str(folder) not in kept:
                    shutil.rmtree(folder, ignore_errors=True)
            for empty in (parent, version_path(self._data_dir, f"{run_id}/x").parent):
                if empty.is_dir() and not any(empty.iterdir()):
                    empty.rmdir()

        await asyncio.to_thread(sweep)

    def path_of(self, name: str) -> str:
        return str(version_path(self._data_dir, name))


def _checkpoint(row: RowMapping) -> Checkpoint:
    return Checkpoint(
        path=parse_checkpoint_path(row["path"]),
        base_model=row["base_model"],
        folder=row["folder"],
        version=row["version"],
        step=row["step"],
        bytes=row["bytes"],
        optimizer=row["optimizer"],
        created_at=row["created_at"],
    )
