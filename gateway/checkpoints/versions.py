"""What the database knows of weight versions, and the room for more of them on the disk."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Insert, insert, select

from gateway.checkpoints.catalog import Checkpoint, CheckpointCatalog
from gateway.checkpoints.collector import GarbageCollector
from gateway.checkpoints.pins import Pins
from gateway.limits.quotas import Quotas
from gateway.storage.database import Database
from gateway.storage.tables import weight_versions
from tandem.errors import StorageFull, UnknownWeights
from tandem.v1 import common_pb2
from tandem.weights import version_path


@dataclass(frozen=True)
class WeightVersion:
    """A published weight version, or a base model's (`base/NAME`). `path` is its folder.

    `adapter`: it is a LoRA adapter upon the base model, in PEFT's layout.
    """

    name: str
    path: str
    run_id: str
    step: int
    base_model: str
    adapter: bool = False

    def to_proto(self) -> common_pb2.WeightVersion:
        return common_pb2.WeightVersion(
            name=self.name,
            path=self.path,
            run_id=self.run_id,
            step=self.step,
            adapter=self.adapter,
        )


class VersionStore:
    """Weight versions, the `checkpoints` that name them, and the `holds` on both."""

    def __init__(
        self,
        *,
        database: Database,
        data_dir: Path,
        min_free_bytes: int,
        limits: Quotas,
    ) -> None:
        self._database = database
        self._data_dir = data_dir
        self._min_free_bytes = min_free_bytes
        self._limits = limits
        self.holds = Pins()
        self.checkpoints = CheckpointCatalog(database=database, holds=self.holds)
        self._collector = GarbageCollector(
            database=database,
            data_dir=data_dir,
            holds=self.holds,
            again=self.checkpoints.mark,
        )

    async def check_space(self, *, expected_bytes: int, what: str) -> None:
        """Raises `StorageFull` before anything is written."""
        free = (await asyncio.to_thread(shutil.disk_usage, self._data_dir)).free
        if free < self._min_free_bytes + expected_bytes:
            raise StorageFull(
                f"there is no room to {what}: {free} bytes are free in the data directory, "
                f"{expected_bytes} are needed and {self._min_free_bytes} are kept free; "
                "what was served before goes on being served"
            )

    async def check_room(
        self, *, owner: str, expected_bytes: int, what: str, replaced: Checkpoint | None = None
    ) -> None:
        """For a checkpoint, before anything of it is written. Raises `LimitExceeded` where its
        owner would have too much, or as `check_space`."""
        await self.check_share(
            owner=owner,
            expected_bytes=expected_bytes,
            replaced_bytes=replaced.bytes if replaced is not None else 0,
        )
        await self.check_space(expected_bytes=expected_bytes, what=what)

    async def check_share(
        self, *, owner: str, expected_bytes: int, replaced_bytes: int = 0
    ) -> None:
        """Raises `LimitExceeded` where so much more would be too much for the owner."""
        self._limits.check_checkpoint_bytes(
            used=await self.checkpoints.bytes_of_owner(owner),
            expected=expected_bytes,
            replaced=replaced_bytes,
        )

    async def add_version(self, version: WeightVersion, *, parent: str, size: int) -> None:
        await self._database.write(version_row(version, parent=parent, size=size))

    async def version(self, name: str) -> WeightVersion:
        """Raises `UnknownWeights` for one that never was or was collected."""
        row = await self._database.read_one(
            select(weight_versions).where(
                weight_versions.c.name == name, weight_versions.c.collected_at.is_(None)
            )
        )
        if row is None:
            raise UnknownWeights(f"there is no weight version {name!r}")
        return WeightVersion(
            name=row["name"],
            path=row["path"],
            run_id=row["run_id"],
            step=row["step"],
            base_model=row["base_model"],
            adapter=row["adapter"],
        )

    async def created_at(self, name: str) -> float:
        """In seconds since 1970; 0 for one that never was."""
        row = await self._database.read_one(
            select(weight_versions.c.created_at).where(weight_versions.c.name == name)
        )
        return float(row["created_at"]) if row is not None else 0.0

    async def folder_of(self, checkpoint: Checkpoint) -> Path:
        """Where a checkpoint's files lie. Raises `UnknownWeights`."""
        if checkpoint.folder:
            return Path(checkpoint.folder)
        return Path((await self.version(checkpoint.version)).path)

    async def collect(self, run_id: str) -> bool:
        """Removes the run's versions and checkpoints that nothing names or uses. False: some
        are still in use, so that this is worth repeating."""
        return await self._collector.collect(run_id=run_id, partials=False)

    async def sweep_run(self, run_id: str) -> bool:
        """As `collect`, and removes what an interrupted publish or save left. Only when the
        trainer is gone."""
        self.holds.end_owner(run_id)
        return await self._collector.collect(run_id=run_id, partials=True)

    async def sweep_all(self) -> None:
        """Removes what an earlier gateway left that nothing names. Only before anything runs."""
        await self._collector.empty_trash()
        await self._collector.collect(run_id=None, partials=True)

    async def empty_trash(self) -> None:
        await self._collector.empty_trash()

    def path_of(self, name: str) -> str:
        return str(version_path(self._data_dir, name))


def version_row(version: WeightVersion, *, parent: str, size: int) -> Insert:
    return insert(weight_versions).values(
        name=version.name,
        run_id=version.run_id,
        base_model=version.base_model,
        path=version.path,
        parent=parent,
        step=version.step,
        bytes=size,
        adapter=version.adapter,
        created_at=time.time(),
    )
