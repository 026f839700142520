"""Checkpoints by name: `tinker://RUN/KIND/NAME`, what it stands for, and until when.

Three kinds: `weights` (a trainer's state, in a folder of its own), `sampler_weights` and
`external_weights` (weight versions; the external one is for download). What is deleted or
expired is gone from every answer at once; its files go later (`gateway/collector.py`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import ColumnElement, Insert, RowMapping, delete, func, insert, or_, select, update

from gateway.auth.identity import Readers
from gateway.checkpoints.pins import Pins
from gateway.identifiers import (
    CheckpointPath,
    parse_checkpoint_path,
    place_of_folder,
    place_of_version,
)
from gateway.storage.database import Database
from gateway.storage.tables import checkpoints, runs
from tandem.errors import UnknownWeights
from tandem.worker import TrainingSpec


@dataclass(frozen=True)
class Checkpoint:
    """A named save. `folder` is set for the kind `weights`, `version` for the two others.
    Times are seconds since 1970; `expires_at` None: never."""

    path: CheckpointPath
    base_model: str
    folder: str
    version: str
    step: int
    bytes: int
    optimizer: bool
    created_at: float
    owner: str
    public: bool = False
    user_metadata: Mapping[str, str] | None = None
    expires_at: float | None = None

    @property
    def place(self) -> str:
        """Its folder below the data directory."""
        return place_of_folder(Path(self.folder)) if self.folder else place_of_version(self.version)


@dataclass(frozen=True)
class Origin:
    """The run of a checkpoint. `owner` is empty for a run that has no row: nobody's."""

    owner: str = ""
    training: TrainingSpec = field(default_factory=TrainingSpec)


class CheckpointCatalog:
    def __init__(self, *, database: Database, holds: Pins) -> None:
        self._database = database
        self._holds = holds
        self._unnamed_runs: set[str] = set()

    async def put(self, checkpoint: Checkpoint) -> None:
        """Writes the row; one of the same path gives way in the same moment."""
        await self._database.write_together(
            delete(checkpoints).where(checkpoints.c.path == str(checkpoint.path)),
            insert_row(checkpoint),
        )
        self.mark(checkpoint.path.run_id)

    async def find(self, path: CheckpointPath) -> Checkpoint | None:
        row = await self._database.read_one(
            select(checkpoints).where(checkpoints.c.path == str(path), alive())
        )
        return checkpoint_of(row) if row is not None else None

    async def get(self, path: str, *, readers: Readers | None = None) -> Checkpoint:
        """`readers`: on whose behalf; None: whoever asks has been asked already. Raises
        `UnknownWeights`, or `InvalidRequest` for what is no checkpoint path."""
        found = await self.find(parse_checkpoint_path(path))
        if found is None or (
            readers is not None and not readers.may_read(owner=found.owner, public=found.public)
        ):
            raise unknown_checkpoint(path)
        return found

    async def for_training(self, path: str, *, readers: Readers | None = None) -> Checkpoint:
        """One that a trainer can load. Raises as `get`."""
        found = await self.get(path, readers=readers)
        if found.path.kind != "weights":
            raise UnknownWeights(
                f"{path!r} holds weights without a trainer's state; a trainer loads what "
                "save_state wrote (tinker://RUN/weights/NAME)"
            )
        return found

    @asynccontextmanager
    async def reading(
        self, path: str, *, readers: Readers | None = None
    ) -> AsyncIterator[Checkpoint]:
        """The checkpoint, whose files stay while the block runs, whatever becomes of its name.
        Raises as `get`."""
        with self._holds.look_up(parse_checkpoint_path(path).run_id):
            checkpoint = await self.get(path, readers=readers)
            hold = self._holds.hold(checkpoint.place)
            hold.__enter__()
        try:
            yield checkpoint
        finally:
            hold.__exit__(None, None, None)

    async def take_for_training(
        self, path: str, *, run_id: str, readers: Readers | None = None
    ) -> Checkpoint:
        """As `for_training`; its files stay until `holds.give_back`, or the end of `run_id`."""
        with self._holds.look_up(parse_checkpoint_path(path).run_id):
            checkpoint = await self.for_training(path, readers=readers)
            self._holds.take(checkpoint.place, owner=run_id)
        return checkpoint

    async def of_run(self, run_id: str) -> list[Checkpoint]:
        """Those of a run, oldest first."""
        rows = await self._database.read(
            select(checkpoints)
            .where(checkpoints.c.run_id == run_id, alive())
            .order_by(checkpoints.c.created_at)
        )
        return [checkpoint_of(row) for row in rows]

    async def of_owner(
        self, owner: str | None, *, limit: int, offset: int
    ) -> tuple[list[Checkpoint], int]:
        """A page of an owner's (None: everybody's), newest first, and how many there are."""
        mine = [alive()] if owner is None else [alive(), checkpoints.c.owner == owner]
        rows = await self._database.read(
            select(checkpoints)
            .where(*mine)
            .order_by(checkpoints.c.created_at.desc(), checkpoints.c.path)
            .limit(limit)
            .offset(offset)
        )
        count = await self._database.read_one(
            select(func.count().label("total")).select_from(checkpoints).where(*mine)
        )
        assert count is not None
        return [checkpoint_of(row) for row in rows], count["total"]

    async def bytes_of_owner(self, owner: str) -> int:
        """Of all of an owner's checkpoints together."""
        row = await self._database.read_one(
            select(func.coalesce(func.sum(checkpoints.c.bytes), 0).label("total")).where(
                checkpoints.c.owner == owner, alive()
            )
        )
        assert row is not None
        return int(row["total"])

    async def set_public(self, checkpoint: Checkpoint, *, public: bool) -> None:
        await self._change(checkpoint, public=public)

    async def set_ttl(self, checkpoint: Checkpoint, ttl_seconds: int | None) -> None:
        """Counted from now; None: it does not expire."""
        expires_at = time.time() + ttl_seconds if ttl_seconds is not None else None
        await self._change(checkpoint, expires_at=expires_at)

    async def delete(self, checkpoint: Checkpoint) -> None:
        """Takes the name away; the files go when nobody uses them."""
        await self._database.write(
            delete(checkpoints).where(
                checkpoints.c.path == str(checkpoint.path),
                checkpoints.c.created_at == checkpoint.created_at,
            )
        )
        self.mark(checkpoint.path.run_id)

    async def expire(self) -> None:
        """Takes the names away whose time is over."""
        over = checkpoints.c.expires_at <= time.time()
        rows = await self._database.read(select(checkpoints.c.run_id).where(over).distinct())
        if rows:
            await self._database.write(delete(checkpoints).where(over))
            self._unnamed_runs.update(row["run_id"] for row in rows)

    def mark(self, run_id: str) -> None:
        """Something of this run may have lost its name."""
        self._unnamed_runs.add(run_id)

    def unnamed(self) -> list[str]:
        """The runs that lost a name since this was last asked."""
        found, self._unnamed_runs = sorted(self._unnamed_runs), set()
        return found

    async def find_origin(self, run_id: str) -> Origin | None:
        """As `origin`; None for a run that never was."""
        row = await self._database.read_one(select(runs.c.id).where(runs.c.id == run_id))
        return await self.origin(run_id) if row is not None else None

    async def origin(self, run_id: str) -> Origin:
        """Whose a run is, and what it trains or trained."""
        row = await self._database.read_one(
            select(runs.c.training, runs.c.owner).where(runs.c.id == run_id)
        )
        if row is None:
            return Origin()
        training = row["training"]
        return Origin(
            owner=row["owner"],
            training=TrainingSpec.model_validate(training) if training else TrainingSpec(),
        )

    async def _change(self, checkpoint: Checkpoint, **values: object) -> None:
        await self._database.write(
            update(checkpoints)
            .where(
                checkpoints.c.path == str(checkpoint.path),
                checkpoints.c.created_at == checkpoint.created_at,
            )
            .values(**values)
        )


def unknown_checkpoint(path: str) -> UnknownWeights:
    return UnknownWeights(f"there is no checkpoint {path!r}; it may be deleted or expired")


def insert_row(checkpoint: Checkpoint) -> Insert:
    return insert(checkpoints).values(
        path=str(checkpoint.path),
        run_id=checkpoint.path.run_id,
        kind=checkpoint.path.kind,
        base_model=checkpoint.base_model,
        folder=checkpoint.folder,
        version=checkpoint.version,
        step=checkpoint.step,
        bytes=checkpoint.bytes,
        optimizer=checkpoint.optimizer,
        owner=checkpoint.owner,
        public=checkpoint.public,
        user_metadata=dict(checkpoint.user_metadata) if checkpoint.user_metadata else None,
        created_at=checkpoint.created_at,
        expires_at=checkpoint.expires_at,
    )


def alive() -> ColumnElement[bool]:
    """The rows of checkpoints that have not expired."""
    return or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > time.time())


def checkpoint_of(row: RowMapping) -> Checkpoint:
    return Checkpoint(
        path=parse_checkpoint_path(row["path"]),
        base_model=row["base_model"],
        folder=row["folder"],
        version=row["version"],
        step=row["step"],
        bytes=row["bytes"],
        optimizer=row["optimizer"],
        created_at=row["created_at"],
        owner=row["owner"],
        public=row["public"],
        user_metadata=row["user_metadata"],
        expires_at=row["expires_at"],
    )
