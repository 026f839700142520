"""Checkpoints by name: `tinker://RUN/KIND/NAME`, their files and their expiry.

The kinds are `weights` (a trainer's state in its own folder), `sampler_weights` and
`external_weights` (weight versions, the latter for download). A deleted or expired checkpoint is
hidden at once, and its files are removed later. An expired one comes back within a grace period if
the clock was ahead."""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

from sqlalchemy import (
    ColumnElement,
    Executable,
    Insert,
    RowMapping,
    delete,
    func,
    insert,
    select,
    update,
)

from gateway.checkpoints.pins import Pins
from gateway.identifiers import (
    CheckpointPath,
    parse_checkpoint_path,
    relative_version_folder,
)
from gateway.owners.auth.identity import Caller, Readers, visible
from gateway.owners.limits import Quotas
from gateway.storage.database import Database, from_row
from gateway.storage.tables import checkpoints, released_folders, run_records, runs
from tandem.errors import UnknownWeights
from tandem.protocol.worker import TrainingSpec


@dataclass(frozen=True)
class Checkpoint:
    """A named save. `folder`, relative to the data directory, is set for the kind `weights`,
    `version` for the others. Times are in seconds since 1970. `expires_at` is None for no expiry.
    """

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
    def relative_folder(self) -> str:
        return self.folder or relative_version_folder(self.version)


@dataclass(frozen=True)
class Origin:
    """A checkpoint's training run. `owner` is empty if the database does not have the run."""

    owner: str = ""
    project_id: str = ""
    training: TrainingSpec = field(default_factory=TrainingSpec)


@dataclass(frozen=True)
class StorageUse:
    project_id: str
    owner: str
    count: int
    bytes: int


_LATER = 1e-6
"""Seconds between the times of two saves, at least."""
EXPIRY_GRACE = 86_400.0
"""Seconds for which an expired checkpoint's files stay, in case the clock was ahead."""


@dataclass(eq=False, kw_only=True)
class CheckpointCatalog:
    """`expiry_grace` is in seconds."""

    database: Database
    pins: Pins
    limits: Quotas
    expiry_grace: float = EXPIRY_GRACE

    def __post_init__(self) -> None:
        self._unnamed_runs: set[str] = set()
        self.snapshot_bytes: Counter[str] = Counter()
        """Snapshot bytes by owner. Runs remove their own snapshots."""
        self.given_up: defaultdict[str, set[str]] = defaultdict(set)
        """By run, folders of failed saves."""

    @contextmanager
    def writing(self, folder: str, *, run_id: str) -> Iterator[None]:
        """Pin a folder that a trainer writes, for the block. The collector removes the folder of a
        failed block."""
        with self.pins.pinned(folder):
            try:
                yield
            except BaseException:
                self.given_up[run_id].add(folder)
                raise

    async def put(self, checkpoint: Checkpoint) -> None:
        """Write the row of a complete checkpoint and replace one with this path. `created_at` is
        later than that of the run's others of the kind, even after the clock went back. Raises
        `StorageFailed`."""
        table, path = checkpoints.c, checkpoint.path
        others = (table.run_id == path.run_id) & (table.kind == path.kind)
        newest = func.coalesce(func.max(table.created_at), 0.0)
        after = await self.database.read_value(select(newest).where(others)) + _LATER
        checkpoint = replace(checkpoint, created_at=max(checkpoint.created_at, after))
        await self.database.write_together(
            *_release(checkpoints.c.path == str(checkpoint.path)),
            insert_row(checkpoint),
            durable=True,
        )
        self.mark(checkpoint.path.run_id)

    async def find(self, path: CheckpointPath) -> Checkpoint | None:
        """Return the checkpoint or None, without a check of access rights."""
        row = await self.database.read_one(
            select(checkpoints).where(checkpoints.c.path == str(path), not_expired())
        )
        return checkpoint_of(row) if row is not None else None

    async def free_state_path(self, run_id: str, name: str) -> CheckpointPath:
        """Return an unused path of the kind `weights`, with a random suffix if the name is
        taken."""
        path = CheckpointPath(run_id=run_id, kind="weights", name=name)
        if await self.find(path) is None:
            return path
        return replace(path, name=f"{name}-{secrets.token_hex(4)}")

    async def get(
        self, path: str, *, readers: Readers | None, trainable: bool = False
    ) -> Checkpoint:
        """Return the checkpoint. Raise `UnknownWeights` if it is missing, hidden from `readers`
        (None: everything is visible) or not `trainable`, and `InvalidRequest` for a malformed
        path."""
        found = await self.find(parse_checkpoint_path(path))
        if found is None or (
            readers is not None and not readers.may_read(owner=found.owner, public=found.public)
        ):
            raise unknown_checkpoint(path)
        if trainable and found.path.kind != "weights":
            raise UnknownWeights(
                f"{path!r} holds weights without a trainer's state; a trainer loads what "
                "save_state wrote (tinker://RUN/weights/NAME)"
            )
        return found

    @asynccontextmanager
    async def reading(
        self, path: str, *, readers: Readers | None, trainable: bool = False
    ) -> AsyncIterator[Checkpoint]:
        """Return the checkpoint and keep its files for the block, even if its name is deleted.
        Raises as `get`."""
        with ExitStack() as pinned:
            with self.pins.resolving(parse_checkpoint_path(path).run_id):
                checkpoint = await self.get(path, readers=readers, trainable=trainable)
                pinned.enter_context(self.pins.pinned(checkpoint.relative_folder))
            yield checkpoint

    async def of_run(self, run_id: str) -> AsyncIterator[list[Checkpoint]]:
        table = checkpoints.c
        query = select(checkpoints).where(table.run_id == run_id, not_expired())
        async for rows in self.database.read_in_batches(query, table.created_at, table.path):
            yield [checkpoint_of(row) for row in rows]

    async def newest_version(self, run_id: str) -> str:
        """Return the weight version of a run's newest sampler checkpoint, or ""."""
        row = await self.database.read_one(
            select(checkpoints.c.version)
            .where(
                checkpoints.c.run_id == run_id,
                checkpoints.c.kind == "sampler_weights",
                not_expired(),
            )
            .order_by(checkpoints.c.created_at.desc())
            .limit(1)
        )
        return row["version"] if row is not None else ""

    async def of_owner(
        self, owner: str | None, *, limit: int, offset: int
    ) -> tuple[list[Checkpoint], int]:
        """Return a page of an owner's checkpoints (None: everybody's), newest first, and the total
        number."""
        wanted = [not_expired()] if owner is None else [not_expired(), checkpoints.c.owner == owner]
        rows = await self.database.read(
            select(checkpoints)
            .where(*wanted)
            .order_by(checkpoints.c.created_at.desc(), checkpoints.c.path)
            .limit(limit)
            .offset(offset)
        )
        total = await self.database.read_value(
            select(func.count()).select_from(checkpoints).where(*wanted)
        )
        return [checkpoint_of(row) for row in rows], total

    async def check_quota(
        self, *, owner: str, expected_bytes: int, replaced_bytes: int = 0
    ) -> None:
        """Raise `LimitExceeded` if the owner may not store this many bytes more. Snapshots and
        records of runs count as well."""
        saved = select(func.coalesce(func.sum(checkpoints.c.bytes), 0)).where(
            checkpoints.c.owner == owner, not_expired()
        )
        records = select(func.coalesce(func.sum(run_records.c.bytes), 0)).where(
            run_records.c.run_id == runs.c.id, runs.c.owner == owner
        )
        used = await self.database.read_value(
            select(saved.scalar_subquery() + records.scalar_subquery())
        )
        self.limits.check(
            "checkpoint_bytes",
            owner=owner,
            used=int(used) + self.snapshot_bytes[owner] - replaced_bytes,
            adding=expected_bytes,
        )

    async def storage_use(self, caller: Caller, *, project_id: str | None) -> list[StorageUse]:
        wanted = [not_expired(), visible(checkpoints.c.owner, caller, "accessible")]
        if project_id is not None:
            wanted.append(runs.c.project_id == project_id)
        group = (runs.c.project_id, checkpoints.c.owner)
        rows = await self.database.read(
            select(
                *group,
                func.count().label("count"),
                func.sum(checkpoints.c.bytes).label("bytes"),
            )
            .join(runs, runs.c.id == checkpoints.c.run_id)
            .where(*wanted)
            .group_by(*group)
            .order_by(*group)
        )
        return [from_row(StorageUse, row, bytes=int(row["bytes"])) for row in rows]

    async def set_ttl(self, checkpoint: Checkpoint, ttl_seconds: int | None) -> None:
        """Set the expiry to this many seconds from now; None: never."""
        expires_at = time.time() + ttl_seconds if ttl_seconds is not None else None
        await self.change(checkpoint, expires_at=expires_at)

    async def change(self, checkpoint: Checkpoint, **values: object) -> None:
        await self.database.write(
            update(checkpoints).where(_is(checkpoint)).values(**values), durable=True
        )

    async def delete(self, checkpoint: Checkpoint) -> None:
        await self.database.write_together(*_release(_is(checkpoint)), durable=True)
        self.mark(checkpoint.path.run_id)

    async def release_states(self, run_id: str, *, keep: int) -> None:
        """Delete the checkpoints of the kind `weights` of a run, without the newest `keep`, public
        ones and files in use."""
        table = checkpoints.c
        rows = await self.database.read(
            select(checkpoints)
            .where(table.run_id == run_id, table.kind == "weights", not_expired())
            .order_by(table.created_at.desc(), table.path.desc())
            .offset(keep)
        )
        if self.pins.is_resolving(run_id):  # somebody loads one of them
            return
        used = self.pins.folders()
        for old in map(checkpoint_of, rows):
            if not old.public and old.folder not in used:
                await self.delete(old)

    async def expire(self) -> None:
        now, seen = time.time(), checkpoints.c.expired_at
        expired = checkpoints.c.expires_at <= now
        # Noted while the clock was ahead.
        wrong = seen.is_not(None) & ((checkpoints.c.expires_at > now) | (seen > now))
        new, over = expired & seen.is_(None), expired & (seen <= now - self.expiry_grace)
        for which, value in ((wrong, None), (new, now)):
            if await self.database.read_one(select(checkpoints.c.path).where(which).limit(1)):
                change = update(checkpoints).where(which).values(expired_at=value)
                await self.database.write(change, durable=True)
        rows = await self.database.read(select(checkpoints.c.run_id).where(over).distinct())
        if rows:
            await self.database.write_together(*_release(over), durable=True)
            self._unnamed_runs.update(row["run_id"] for row in rows)

    def mark(self, run_id: str) -> None:
        self._unnamed_runs.add(run_id)

    def take_marked(self) -> list[str]:
        marked, self._unnamed_runs = sorted(self._unnamed_runs), set()
        return marked

    async def origin(self, run_id: str) -> Origin:
        row = await self.database.read_one(
            select(runs.c.training, runs.c.owner, runs.c.project_id).where(runs.c.id == run_id)
        )
        if row is None:
            return Origin()
        return Origin(
            owner=row["owner"],
            project_id=row["project_id"],
            training=TrainingSpec.model_validate(row["training"]),
        )


def unknown_checkpoint(path: str) -> UnknownWeights:
    return UnknownWeights(
        f"there is no checkpoint {path!r}; it may be deleted, expired or another owner's. "
        "`tandem checkpoints list` shows yours"
    )


def insert_row(checkpoint: Checkpoint) -> Insert:
    path, metadata = checkpoint.path, checkpoint.user_metadata
    values = {"path": str(path), "run_id": path.run_id, "kind": path.kind}
    return insert(checkpoints).values(
        {**vars(checkpoint), **values, "user_metadata": dict(metadata) if metadata else None}
    )


def checkpoint_of(row: RowMapping) -> Checkpoint:
    return from_row(Checkpoint, row, path=parse_checkpoint_path(row["path"]))


def not_expired() -> ColumnElement[bool]:
    return checkpoints.c.expires_at.is_(None) | (checkpoints.c.expires_at > time.time())


def _release(which: ColumnElement[bool]) -> list[Executable]:
    """Return statements that delete names and release their folders to the collector."""
    table = checkpoints.c
    folders = select(table.folder, table.run_id).where(which, table.folder != "")
    return [
        insert(released_folders).from_select(["folder", "run_id"], folders),
        delete(checkpoints).where(which),
    ]


def _is(checkpoint: Checkpoint) -> ColumnElement[bool]:
    """Match this checkpoint, not a newer one with its path."""
    table = checkpoints.c
    return (table.path == str(checkpoint.path)) & (table.created_at == checkpoint.created_at)
