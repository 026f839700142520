"""Removes weight versions and checkpoint folders that nothing names and nobody uses.

It removes what the database knows: folders that were released, and weight versions without a name;
and what this gateway asked a trainer for and named nowhere. Of others, a folder without a list of
its files is what a crash left of a save, and goes as well; a complete one goes into quarantine,
because its saver may have been told that it is saved. While database and data directory do not
belong together (`gateway/storage/pairing.py`), nothing is removed at all.

A folder is kept while a checkpoint or an active sampling session names it, and while it is
pinned: by a run, by a sampler, or by whoever reads or writes it. What a kept version is a delta of
is kept with it. Files are written before their
name and removed after it, so a crash at any point leaves at worst files without a name, which
`collect_all` removes at the next start.

The order of the checks matters, because saving and reading go on meanwhile: first list the
disk, so that nothing younger is touched; then what is in use; then the names (a save unpins its
folder only after its name is committed); then once more what is in use (a reader pins a folder
after it has found the name).

Collecting a folder is one rename into the trash, so that collections of several runs need not wait
for one another. One task at a time then removes what is in the trash, which can take long.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from sqlalchemy import delete, literal, select, union_all, update

from gateway.checkpoints.catalog import CheckpointCatalog
from gateway.checkpoints.quarantine import Quarantine
from gateway.checkpoints.versions import FILE_LISTS
from gateway.identifiers import relative_version_folder, run_folder_name
from gateway.storage.database import Database
from gateway.storage.pairing import MISMATCH
from gateway.storage.tables import (
    checkpoints,
    released_folders,
    sampling_sessions,
    weight_versions,
)
from tandem.errors import describe
from tandem.telemetry import get_log

_ROOTS = ("weights", "checkpoints")
_PARTIAL_PREFIX = ".partial-"
_TRASH = ".trash"
QUARANTINED = (
    "the database knows nothing of these checkpoints: it may be an older copy. They are in "
    "quarantine and will be removed; `tandem checkpoints adopt` takes them back"
)


class GarbageCollector:
    def __init__(
        self,
        *,
        database: Database,
        data_dir: Path,
        checkpoints: CheckpointCatalog,
        quarantine: Quarantine,
    ) -> None:
        self.paired = True
        self.quarantine = quarantine
        self._database = database
        self._data_dir = data_dir
        self.checkpoints = checkpoints
        self._pins = checkpoints.pins
        self._emptying = asyncio.Lock()
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_log()

    async def collect_all(self) -> None:
        """Remove what an earlier gateway left. Call it only before anything runs."""
        await self.collect(None, ended=True)
        self.empty_trash_soon()

    async def close(self) -> None:
        """Stop removing; the next gateway goes on with what is left in the trash."""
        self._closing = True
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def empty_trash(self) -> None:
        """Remove what is in the trash: also what a crash or a failing disk left there. That can
        take minutes."""
        async with self._emptying:
            if self.paired:
                await asyncio.to_thread(self._empty_trash)

    def empty_trash_soon(self) -> None:
        """As `empty_trash`, without waiting."""
        if len(self._tasks) > 1:  # one is at work, and the next will find everything
            return
        task = asyncio.create_task(self.empty_trash(), name="empty-trash")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def collect(self, run_id: str | None, *, ended: bool = False) -> bool:
        """Remove the folders of a run (of all, for None) that nothing names or uses; partial
        folders as well if its trainer has stopped. Return False if some are still in use, so that
        the call is worth repeating."""
        if not self.paired:
            return False
        found = await asyncio.to_thread(self._list_folders, run_id, ended)
        used = self._pins.folders()
        if not await self._database.flush():  # it may name what has lost its name
            if run_id is not None:
                self.checkpoints.mark(run_id)
            return False
        named, known = await self._named(run_id), await self._known(run_id)
        known |= self.checkpoints.given_up.get(run_id or "", set())
        used |= self._pins.folders()
        used |= {f"{path.parent}/{_PARTIAL_PREFIX}{path.name}" for path in map(Path, used)}
        named |= await self._bases(run_id, used | named)
        unnamed = [folder for folder in found if folder not in named]
        if run_id is not None and self._pins.is_resolving(run_id):
            if unnamed:
                self.checkpoints.mark(run_id)
            return not unnamed
        unused = [folder for folder in unnamed if folder not in used]
        if unused:
            removed, refused = await asyncio.to_thread(self._put_away, unused, known)
            self.empty_trash_soon()
            await self._note(run_id, removed)
            self._log.info("collected", run_id=run_id, folders=removed)
            if refused:
                return False
        if ended:
            await asyncio.to_thread(self._remove_empty_run_folders, run_id)
            self.checkpoints.given_up.pop(run_id or "", None)
        return len(unused) == len(unnamed)

    async def expire_quarantine(self) -> None:
        """Put what was in quarantine for too long into the trash."""
        if self.paired:
            ended = await asyncio.to_thread(self._end_quarantine)
            if ended:
                self.empty_trash_soon()

    async def warnings(self) -> list[str]:
        """Return what an operator should know, in sentences."""
        if not self.paired:
            return [MISMATCH]
        held = await asyncio.to_thread(self.quarantine.folders)
        return [f"{', '.join(held)}: {QUARANTINED}"] if held else []

    async def unknown_folders(self) -> list[str]:
        """Return the complete folders of which the database knows nothing and that nobody uses:
        those in quarantine, and those that are still where they were."""
        found = await asyncio.to_thread(self._list_folders, None, False)
        used = self._pins.folders()
        await self._database.flush()
        used |= await self._named(None) | await self._known(None)
        used |= self._pins.folders()
        return await asyncio.to_thread(
            lambda: [
                *self.quarantine.folders(),
                *(f for f in found if f not in used and self._is_complete(f)),
            ]
        )

    def _list_folders(self, run_id: str | None, partials: bool) -> list[str]:
        found: list[Path] = []
        for run in self._run_folders(run_id):
            with suppress(FileNotFoundError):  # another collection just removed it, being empty
                found += sorted(run.iterdir())
        return [
            str(folder.relative_to(self._data_dir))
            for folder in found
            if partials or not folder.name.startswith(_PARTIAL_PREFIX)
        ]

    def _run_folders(self, run_id: str | None) -> list[Path]:
        name = run_folder_name(run_id) if run_id is not None else "*"
        found = [path for root in _ROOTS for path in sorted(self._data_dir.glob(f"{root}/{name}"))]
        return [path for path in found if _is_own_folder(path) and path.name != _TRASH]

    async def _named(self, run_id: str | None) -> set[str]:
        saved = select(checkpoints.c.folder, checkpoints.c.version)
        sampled = select(literal(""), sampling_sessions.c.version).where(
            sampling_sessions.c.state == "active", sampling_sessions.c.run_id != ""
        )
        if run_id is not None:
            saved = saved.where(checkpoints.c.run_id == run_id)
            sampled = sampled.where(sampling_sessions.c.run_id == run_id)
        rows = await self._database.read(union_all(saved, sampled))
        return {row["folder"] or relative_version_folder(row["version"]) for row in rows}

    async def _bases(self, run_id: str | None, kept: set[str]) -> set[str]:
        """Return the folders of what kept versions are deltas of. While one is being written its
        run has another pinned that is, or is a delta of, the same."""
        deltas = select(weight_versions.c.name, weight_versions.c.delta_of).where(
            weight_versions.c.delta_of != "", weight_versions.c.collected_at.is_(None)
        )
        if run_id is not None:
            deltas = deltas.where(weight_versions.c.run_id == run_id)
        return {
            relative_version_folder(row["delta_of"])
            for row in await self._database.read(deltas)
            if relative_version_folder(row["name"]) in kept
        }

    async def _known(self, run_id: str | None) -> set[str]:
        """Return the folders without a name that the database knows all the same."""
        released = select(released_folders.c.folder, literal("").label("name"))
        versions = select(literal(""), weight_versions.c.name).where(
            weight_versions.c.collected_at.is_(None)
        )
        if run_id is not None:
            released = released.where(released_folders.c.run_id == run_id)
            versions = versions.where(weight_versions.c.run_id == run_id)
        rows = await self._database.read(union_all(released, versions))
        return {row["folder"] or relative_version_folder(row["name"]) for row in rows}

    def _is_complete(self, folder: str) -> bool:
        path = self._data_dir / folder
        named = _is_own_folder(path) and not path.name.startswith(_PARTIAL_PREFIX)
        return named and any((path / name).is_file() for name in FILE_LISTS)

    def _put_away(self, folders: list[str], known: set[str]) -> tuple[list[str], list[str]]:
        """Rename the complete folders that the database does not know into quarantine, the others
        into the trash, so that nothing half removed has a name. Return the latter, and those of
        either kind that the disk refused to rename."""
        lost = [f for f in folders if f not in known and self._is_complete(f)]
        removed, refused = [], []
        for folder in folders:
            try:
                if folder in lost:
                    self.quarantine.put(folder)
                    continue
                with suppress(FileNotFoundError):  # a partial folder that its writer just discarded
                    self._throw_away(folder, self._data_dir / folder)
                removed.append(folder)
            except OSError as error:  # stays where it is, and is tried again
                self._log.error("not_put_away", folder=folder, reason=describe(error))
                refused.append(folder)
        if quarantined := [folder for folder in lost if folder not in refused]:
            self._log.warning("quarantined", folders=quarantined, hint=QUARANTINED)
        return removed, refused

    def _end_quarantine(self) -> list[str]:
        """Return the folders whose quarantine is over, and which are in the trash now."""
        ended = []
        for folder in self.quarantine.overdue():
            try:
                self._throw_away(folder, self.quarantine.path(folder))
            except OSError as error:  # stays where it is, and is tried again
                self._log.error("not_removed", path=folder, reason=describe(error))
            else:
                self._log.warning("quarantine_ended", folder=folder)
                ended.append(folder)
        return ended

    def _throw_away(self, folder: str, path: Path) -> None:
        """Rename a folder, which is at `path` now, into the trash."""
        trash = self._data_dir / folder.partition("/")[0] / _TRASH
        trash.mkdir(parents=True, exist_ok=True)
        path.rename(trash / secrets.token_hex(8))

    def _empty_trash(self) -> None:
        for trash in (self._data_dir / root / _TRASH for root in _ROOTS):
            if not _is_own_folder(trash):
                continue
            for child in trash.iterdir():
                if self._closing:
                    return
                try:
                    shutil.rmtree(child) if _is_own_folder(child) else child.unlink()
                except OSError as error:  # stays in the trash until it is emptied again
                    self._log.error("not_removed", path=str(child), reason=describe(error))

    def _remove_empty_run_folders(self, run_id: str | None) -> None:
        for folder in self._run_folders(run_id):
            with suppress(OSError):  # something is in it, or another collection was faster
                folder.rmdir()

    async def _note(self, run_id: str | None, removed: list[str]) -> None:
        """Record in the database which versions were removed."""
        gone = update(weight_versions).where(weight_versions.c.path.in_(removed))
        if run_id is not None:
            gone = gone.where(weight_versions.c.run_id == run_id)
        await self._database.write_together(
            gone.values(collected_at=time.time()),
            delete(released_folders).where(released_folders.c.folder.in_(removed)),
        )


def _is_own_folder(path: Path) -> bool:
    """Return whether the path is a folder and not a link: what lies elsewhere is not ours."""
    return path.is_dir() and not path.is_symlink()
