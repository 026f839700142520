"""Weight versions: their rows, files and disk space."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Executable, Insert, insert, select, update

from gateway.checkpoints.catalog import Checkpoint
from gateway.identifiers import relative_version_folder
from gateway.storage.database import Database, from_row
from gateway.storage.tables import runs, weight_versions
from tandem.errors import CheckpointDamaged, StorageFull, UnknownWeights, describe, without_paths
from tandem.v1 import common_pb2
from tandem.weights import Manifest, version_path
from tandem.weights.manifest import MANIFEST_NAME
from tandem.weights.store import check_own_file, read_record

_STATE_RECORD = "checkpoint.json"
"""A trainer's list of the files in its saved state."""
FILE_LISTS = (_STATE_RECORD, MANIFEST_NAME)
"""Every complete folder has one of these files."""


@dataclass(frozen=True)
class WeightVersion:
    """A published weight version, or a base model's (`base/NAME`). `path` is its folder. `adapter`
    means a LoRA adapter in PEFT's layout. `parent` is the version before it.
    `created_at` is in seconds since 1970."""

    name: str
    path: str
    run_id: str
    step: int
    base_model: str
    adapter: bool = False
    parent: str = ""
    bytes: int = 0
    created_at: float = field(default_factory=time.time, compare=False)

    def to_proto(self) -> common_pb2.WeightVersion:
        return common_pb2.WeightVersion(
            name=self.name,
            path=self.path,
            run_id=self.run_id,
            step=self.step,
            adapter=self.adapter,
        )


class VersionStore:
    def __init__(self, *, database: Database, data_dir: Path, min_free_bytes: int) -> None:
        self._database = database
        self._data_dir = data_dir
        self._min_free_bytes = min_free_bytes

    def path_of(self, name: str) -> str:
        return str(version_path(self._data_dir, name))

    async def add_version(
        self, version: WeightVersion, *, facts: Mapping[str, object] | None = None
    ) -> None:
        """Write a version and, in one transaction, the columns `facts` of its run."""
        writes: list[Executable] = [insert_version(version)]
        if facts:
            writes.append(update(runs).where(runs.c.id == version.run_id).values(**facts))
        await self._database.write_together(*writes)

    async def find(self, name: str) -> WeightVersion | None:
        """Return a version, None if it never existed or was collected."""
        return (await self.find_all([name])).get(name)

    async def find_all(self, names: Collection[str]) -> dict[str, WeightVersion]:
        """Return the existing versions with these names, by name."""
        rows = await self._database.read(
            select(weight_versions).where(
                weight_versions.c.name.in_(names), weight_versions.c.collected_at.is_(None)
            )
        )
        return {
            row["name"]: from_row(WeightVersion, row, path=str(self._data_dir / row["path"]))
            for row in rows
        }

    async def version(self, name: str) -> WeightVersion:
        """Return a version. Raises `UnknownWeights`."""
        if (found := await self.find(name)) is None:
            raise UnknownWeights(f"there is no weight version {name!r}")
        return found

    async def files(self, checkpoint: Checkpoint) -> dict[str, Path]:
        """Return a checkpoint's files by name. Raises `CheckpointDamaged`."""
        folder = self._data_dir / checkpoint.relative_folder
        return await asyncio.to_thread(files_of, checkpoint, folder)

    async def check_space(self, *, expected_bytes: int, what: str) -> None:
        """Raise `StorageFull` without disk space to `what`, a phrase such as "publish the weights".
        Call it before any write."""
        free = (await asyncio.to_thread(shutil.disk_usage, self._data_dir)).free
        if free < self._min_free_bytes + expected_bytes:
            raise StorageFull(
                f"there is no room to {what}: {free} bytes are free in the data directory, "
                f"{expected_bytes} are needed and {self._min_free_bytes} are kept free"
            )


def insert_version(version: WeightVersion) -> Insert:
    values = {**vars(version), "path": relative_version_folder(version.name)}
    return insert(weight_versions).values(values)


def files_of(checkpoint: Checkpoint, folder: Path) -> dict[str, Path]:
    """Return the files in the checkpoint's manifest or record, by name. A trainer's state includes
    its record. Raises `CheckpointDamaged` for an unreadable list or a path outside the folder."""
    try:
        if checkpoint.path.kind == "weights":
            record = json.loads(read_record(folder / _STATE_RECORD))
            names = [_STATE_RECORD, *(str(entry["name"]) for entry in record["files"])]
        else:
            manifest = Manifest.model_validate_json(read_record(folder / MANIFEST_NAME))
            names = [entry.name for entry in manifest.files]
        return {name: check_own_file(folder, name) for name in names}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = without_paths(describe(error))
        raise CheckpointDamaged(f"{checkpoint.path} cannot be read: {why}") from error
