"""Copies checkpoints, each under an untrainable run of its own.

Files are hard links if the filesystem supports them. Source and copy can be deleted in any order.
The copy's run id derives from the idempotency key, so a repeated request returns the first copy,
even after a restart."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import insert, select

from gateway.checkpoints.catalog import Checkpoint, CheckpointCatalog, insert_row
from gateway.checkpoints.versions import VersionStore, files_of, insert_version
from gateway.identifiers import CheckpointPath, new_session_id, new_state_folder, run_id_of
from gateway.owners.auth.identity import Readers
from gateway.storage.database import Database
from gateway.storage.drivers import typed
from gateway.storage.tables import runs, sessions
from tandem.errors import CheckpointDamaged, InvalidRequest, describe, without_paths
from tandem.weights import Manifest, PartialVersion, new_version_name
from tandem.weights.manifest import MANIFEST_NAME
from tandem.weights.store import fsync_path, give_name, read_record

_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS})


@dataclass(frozen=True)
class CopyRequest:
    """`owner` will own the copy. `run_id` is the client's choice in its own session; None creates a
    session in the project `project_id`."""

    source: str
    readers: Readers
    owner: str
    project_id: str
    run_id: str | None
    ttl_seconds: int | None
    idempotency_key: str


@dataclass(eq=False, kw_only=True)
class CheckpointCopier:
    database: Database
    data_dir: Path
    checkpoints: CheckpointCatalog
    versions: VersionStore

    def __post_init__(self) -> None:
        self._under_way: dict[str, tuple[str, asyncio.Task[str]]] = {}

    async def copy(self, request: CopyRequest) -> str:
        """Return the path of the copy. The work continues if the client disconnects.

        Raises `UnknownWeights`, `InvalidRequest` for an existing run, `LimitExceeded`,
        `CheckpointDamaged`, `StorageFull` or `StorageFailed`."""
        run_id = request.run_id or run_id_of(session_id=_session_id(request), model_seq_id=0)
        if run_id not in self._under_way:
            task = asyncio.create_task(self._copy(request, run_id))
            self._under_way[run_id] = (request.source, task)
        source, task = self._under_way[run_id]
        if source != request.source:
            raise InvalidRequest(f"a copy of other weights is being made as {run_id}")
        return await asyncio.shield(task)

    async def close(self) -> None:
        tasks = [task for _, task in self._under_way.values()]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _copy(self, request: CopyRequest, run_id: str) -> str:
        catalog = self.checkpoints
        try:
            # `resolving` keeps the garbage collector away from the partial folder.
            with catalog.pins.resolving(run_id):
                async with catalog.reading(request.source, readers=request.readers) as source:
                    path = replace(source.path, run_id=run_id)
                    run = await self.database.read_one(
                        select(runs.c.reason).where(runs.c.id == run_id)
                    )
                    if run is None:
                        await catalog.check_quota(owner=request.owner, expected_bytes=source.bytes)
                        await self._make(request, source, path)
                    elif run["reason"] != _reason(source) or await catalog.find(path) is None:
                        raise InvalidRequest(f"there is a training run {run_id} already")
                    return str(path)
        except BaseException:
            catalog.mark(run_id)  # unnamed files may be left
            raise
        finally:
            del self._under_way[run_id]

    async def _make(self, request: CopyRequest, source: Checkpoint, path: CheckpointPath) -> None:
        now, run_id = time.time(), path.run_id
        copy = replace(
            source,
            path=path,
            owner=request.owner,
            public=False,
            created_at=now,
            expires_at=now + request.ttl_seconds if request.ttl_seconds else None,
        )
        if source.folder:
            copy = replace(copy, folder=new_state_folder(run_id=run_id, name=path.name))
        else:
            copy = replace(copy, version=new_version_name(run_id=run_id, number=1))
        session_id = run_id.partition(":")[0]
        ended = {
            "owner": request.owner,
            "project_id": request.project_id,
            "created_at": now,
            "ended_at": now,
        }
        origin = await self.checkpoints.origin(source.path.run_id)
        statements = [
            insert_row(copy),
            insert(runs).values(
                id=run_id,
                session_id=session_id,
                base_model=copy.base_model,
                training=origin.training.model_dump(),
                state="ended",
                error_type=InvalidRequest.type,
                reason=_reason(source),
                **ended,
            ),
        ]
        if request.run_id is None:
            statements.append(
                insert(sessions).values(
                    id=session_id,
                    state="finished",
                    reason="success",
                    detail=f"made for a copy of {source.path}",
                    **ended,
                )
            )
        target = self.data_dir / copy.relative_folder
        if copy.version:
            version = replace(
                await self.versions.version(source.version),
                name=copy.version,
                path=str(target),
                run_id=run_id,
                parent=source.version,
                bytes=copy.bytes,
                created_at=now,
            )
            statements.append(insert_version(version))
        with self.checkpoints.writing(copy.relative_folder, run_id=run_id):
            await asyncio.to_thread(
                _link_files, source, self.data_dir / source.relative_folder, copy, target
            )
            await self.database.write_together(*statements, durable=True)


def _reason(source: Checkpoint) -> str:
    """Return why the copy's run has ended. It tells copies of several sources apart."""
    return f"it holds a copy of {source.path} and cannot be trained"


def _session_id(request: CopyRequest) -> str:
    """Derive the session id from the request, so that one idempotency key gives one id."""
    key = request.idempotency_key
    if not key:
        return new_session_id()
    identity = (request.owner, key, request.source, request.project_id, request.ttl_seconds)
    return f"s-{hashlib.sha256(repr(identity).encode()).hexdigest()[:12]}"


def _link_files(source: Checkpoint, folder: Path, copy: Checkpoint, target: Path) -> None:
    """Link the files into a new folder. A weight version gets a new manifest with its own name and
    run."""
    partial = PartialVersion(target)
    try:
        partial.create()
        for name, file in files_of(source, folder).items():
            _link(file, partial.path / name)
        if copy.version:
            manifest = Manifest.model_validate_json(read_record(folder / MANIFEST_NAME))
            changes = {
                "version": copy.version,
                "run_id": copy.path.run_id,
                "parent": source.version,
            }
            partial.commit(manifest.model_copy(update=changes))
        else:
            give_name(partial.path, target)
    except OSError as error:
        partial.discard()
        if isinstance(error, FileNotFoundError):
            why = without_paths(describe(error))
            raise CheckpointDamaged(f"{source.path} could not be copied: {why}") from error
        raise typed(error) from error


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(file, target)
        fsync_path(target)
