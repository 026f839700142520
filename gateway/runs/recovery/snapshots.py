"""The snapshots of runs: their folders, rows and quota."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Container, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sqlalchemy import delete, insert, select

from gateway.checkpoints.catalog import Checkpoint, CheckpointCatalog
from gateway.checkpoints.versions import FILE_LISTS, VersionStore
from gateway.identifiers import CheckpointPath, new_state_folder, run_folder_name
from gateway.runs.recovery.replay_log import Snapshot
from gateway.runs.run import Run
from gateway.storage.database import Database, from_row
from gateway.storage.tables import runs, snapshots
from tandem.errors import StorageFailed, describe
from tandem.telemetry import get_log
from tandem.weights.store import give_name, make_folder

_FOLDER = "snapshots"
KEEPING_PATIENCE = 60.0
"""Seconds for which an ending run's clients wait until its newest snapshot is renamed."""
REPEAT_AFTER = 1.0
"""Seconds before the last state of a run is stored again after a failure of the storage."""


@dataclass(eq=False, repr=False, kw_only=True)
class SnapshotStore:
    """Snapshots lie in `DATA/snapshots/RUN` and count as their owner's checkpoint bytes."""

    database: Database
    data_dir: Path
    checkpoints: CheckpointCatalog
    versions: VersionStore

    def __post_init__(self) -> None:
        self._bytes: defaultdict[str, dict[str, int]] = defaultdict(dict)

    async def remove_ended(self) -> None:
        """Remove the snapshots of ended runs. Folders of unknown runs stay (`GarbageCollector`)."""
        active = select(runs.c.id).where(runs.c.state == "active")
        await self.database.write(delete(snapshots).where(snapshots.c.run_id.not_in(active)))
        rows = await self.database.read(select(snapshots.c.folder))
        kept = {self.data_dir / row["folder"] for row in rows}
        if left := await asyncio.to_thread(lambda: [*(self.data_dir / _FOLDER).glob("*")]):
            rows = await self.database.read(select(runs.c.id))
            known = {run_folder_name(row["id"]) for row in rows}
            folders = [path for path in left if path.name in known]
            await asyncio.to_thread(_remove_others, folders, kept)

    async def of_runs(self, run_ids: Sequence[str]) -> dict[str, list[Snapshot]]:
        """Return the snapshots of each run that has some, oldest first."""
        rows = await self.database.read(
            select(snapshots).where(snapshots.c.run_id.in_(run_ids)).order_by(snapshots.c.seq_id)
        )
        found = dict[str, list[Snapshot]]()
        for row in rows:
            snapshot = from_row(Snapshot, row, folder=str(self.data_dir / row["folder"]))
            found.setdefault(row["run_id"], []).append(snapshot)
        return found

    def resume(self, run: Run, left: Sequence[Snapshot]) -> None:
        """Count a run's snapshots of an earlier gateway."""
        for snapshot in left:
            self._count(run, snapshot)

    async def new_folder(self, run: Run, *, step: int) -> str:
        """Return the folder for a new snapshot. Raises `LimitExceeded` or `StorageFull`."""
        size = run.expected_state_bytes
        await self.checkpoints.check_quota(owner=run.owner, expected_bytes=size)
        await self.versions.check_space(expected_bytes=size, what="take a snapshot")
        return str(self._new_name(run, step=step))

    async def share(self, run: Run, saved: Snapshot) -> Snapshot:
        """Link a client's checkpoint into a snapshot, since the checkpoint may be deleted. The
        snapshot counts no bytes. Raises `OSError`, for example on a filesystem without links."""
        folder = self._new_name(run, step=saved.step)
        await asyncio.to_thread(_link_files, Path(saved.folder), folder)
        return replace(saved, folder=str(folder), bytes=0)

    def record_snapshot(self, run: Run, snapshot: Snapshot) -> None:
        self._count(run, snapshot)
        row = vars(snapshot) | {"run_id": run.id, "folder": self._name_of(snapshot.folder)}
        self.database.write_soon(insert(snapshots), row)

    async def remove_snapshot(self, run: Run, snapshot: Snapshot) -> None:
        if not self._forget(run, snapshot.folder):
            await asyncio.to_thread(_remove, Path(snapshot.folder))

    async def remove_all(self, run: Run) -> None:
        for folder in tuple(self._bytes[run.id]):
            self._forget(run, folder)
        self._bytes.pop(run.id, None)
        await asyncio.to_thread(shutil.rmtree, self._folder_of(run.id), ignore_errors=True)

    async def keep(
        self,
        run: Run,
        snapshot: Snapshot,
        *,
        prefix: str = "recovered",
        patience: float = KEEPING_PATIENCE,
    ) -> CheckpointPath | None:
        """Turn the newest snapshot of an ending run into the checkpoint PREFIX-STEP and return its
        path, None if that fails or takes too long.

        It is tried again for `patience` seconds while the storage fails. A failed try moves the
        files back. A cancelled call completes its current try first."""
        until, path, folder = time.monotonic() + patience, None, ""
        while True:
            try:
                if path is None:
                    name = f"{prefix}-{snapshot.step}"
                    path = await self.checkpoints.free_state_path(run.id, name)
                    folder = new_state_folder(run_id=run.id, name=path.name)
                await _complete(self._turn_into(run, snapshot, path, folder))
                return path
            except Exception as error:  # noqa: BLE001 - the run must end all the same
                again = isinstance(error, StorageFailed) and time.monotonic() < until
                log = get_log().warning if again else get_log().error
                log("snapshot_not_kept", run_id=run.id, again=again, reason=describe(error))
                if not again:
                    return None
            await asyncio.sleep(REPEAT_AFTER)

    async def _turn_into(
        self, run: Run, snapshot: Snapshot, path: CheckpointPath, folder: str
    ) -> None:
        source, place = Path(snapshot.folder), self.data_dir / folder
        with self.checkpoints.pins.pinned(folder):
            moved = asyncio.to_thread(_move, source, place)
            size = await asyncio.wait_for(moved, KEEPING_PATIENCE)
            try:
                found = await self.checkpoints.find(path)
                if found is None or found.folder != folder:  # no earlier try was committed
                    await self.checkpoints.put(
                        Checkpoint(
                            path=path,
                            base_model=run.model.name,
                            folder=folder,
                            version="",
                            step=snapshot.step,
                            bytes=size,
                            optimizer=True,
                            created_at=time.time(),
                            owner=run.owner,
                        )
                    )
            except BaseException:
                await asyncio.to_thread(give_name, place, source)
                raise
        self._forget(run, snapshot.folder)

    def _new_name(self, run: Run, *, step: int) -> Path:
        return self._folder_of(run.id) / f"{step:08d}-{secrets.token_hex(4)}"

    def _folder_of(self, run_id: str) -> Path:
        return self.data_dir / _FOLDER / run_folder_name(run_id)

    def _name_of(self, folder: str) -> str:
        return str(Path(folder).relative_to(self.data_dir))

    def _count(self, run: Run, snapshot: Snapshot) -> None:
        self._bytes[run.id][snapshot.folder] = snapshot.bytes
        self.checkpoints.snapshot_bytes[run.owner] += snapshot.bytes

    def _forget(self, run: Run, folder: str) -> bool:
        """Remove a snapshot and its row, soon. Return False if it was not recorded."""
        if (size := self._bytes[run.id].pop(folder, None)) is None:
            return False
        self.checkpoints.snapshot_bytes[run.owner] -= size
        if not self.checkpoints.snapshot_bytes[run.owner]:
            del self.checkpoints.snapshot_bytes[run.owner]
        self.database.write_soon(
            delete(snapshots).where(snapshots.c.folder == self._name_of(folder)),
            after=partial(_remove, Path(folder)),
        )
        return True


async def _complete(work: Coroutine[None, None, None]) -> None:
    """Await the work. After a cancellation, wait for its end first."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if error := task.exception():
            get_log().warning("snapshot_not_kept", reason=describe(error))
        raise


def _remove_others(folders: Iterable[Path], kept: Container[Path]) -> None:
    for folder in folders:
        for path in folder.glob("*"):
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):  # not empty
            folder.rmdir()


def _link_files(source: Path, target: Path) -> None:
    partial = target.parent / f".partial-{target.name}"
    make_folder(partial)
    try:
        for file in source.iterdir():
            os.link(file, partial / file.name)
        give_name(partial, target)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _remove(folder: Path) -> None:
    for path in (folder, folder.parent / f".partial-{folder.name}"):
        shutil.rmtree(path, ignore_errors=True)


def _move(source: Path, target: Path) -> int:
    """Move a state and return its bytes without file lists, as for a client's save."""
    size = sum(file.stat().st_size for file in source.iterdir() if file.name not in FILE_LISTS)
    with suppress(FileExistsError):
        make_folder(target.parent)
    give_name(source, target)
    return size
