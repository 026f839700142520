"""What a checkpoint says of itself on the disk, in `tandem.json` beside its files.

It is written before the checkpoint's row, and so before anybody is told that it is saved: where
the database was lost, the row is made again from it. What changes later (whether the checkpoint is
published, its time to live) is in the database alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from gateway.identifiers import CheckpointKind
from gateway.storage.data_directory import write_private
from tandem.errors import CheckpointDamaged
from tandem.weights.manifest import RECORD_NAME
from tandem.weights.store import check_own_file, read_record
from tandem.worker import TrainingSpec


class CheckpointRecord(BaseModel):
    """Which checkpoint a folder holds, whose it is, and what its run trained. `created_at` is in
    seconds since 1970."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    kind: CheckpointKind
    name: str
    owner: str
    project_id: str = ""
    base_model: str
    training: TrainingSpec
    step: int
    bytes: int
    created_at: float
    user_metadata: Mapping[str, str] | None = None

    def write(self, folder: Path) -> None:
        """Write it durably into the checkpoint's folder."""
        write_private(folder / RECORD_NAME, self.model_dump_json(indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> CheckpointRecord:
        """Raise `CheckpointDamaged` if the folder does not say which checkpoint it holds."""
        try:
            record = cls.model_validate_json(read_record(folder / RECORD_NAME))
            check_own_file(folder, RECORD_NAME)
        except (OSError, ValidationError) as error:
            raise CheckpointDamaged("it does not say which checkpoint it holds") from error
        return record
