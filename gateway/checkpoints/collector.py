"""Removes weight versions and checkpoint folders that nothing names and nobody uses.

A folder is kept while a checkpoint or an active sampling session names it, and while it is
pinned: by a run, by a sampler, or by whoever reads or writes it. Files are written before their
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

from sqlalchemy import literal, select, union_all, update

from gateway.checkpoints.catalog import CheckpointCatalog
from gateway.identifiers import relative_state_folder, relative_version_folder, run_folder_name
from gateway.storage.database import Database
from gateway.storage.tables import checkpoints, sampling_sessions, weight_versions
from tandem.telemetry import get_log

_ROOTS = ("weights", "checkpoints")
_PARTIAL_PREFIX = ".partial-"
_TRASH = ".trash"


class GarbageCollector:
    def __init__(
        self, *, database: Database, data_dir: Path, checkpoints: CheckpointCatalog
    ) -> None:
        self._database = database
        self._data_dir = data_dir
        self._checkpoints = checkpoints
        self._pins = checkpoints.pins
        self._emptying = asyncio.Lock()
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_log()

    async def collect_all(self) -> None:
        """Remove what an earlier gateway left. Call it only before anything runs."""
        await self.collect(None, ended=True)
        self._empty_trash_soon()

    async def close(self) -> None:
        """Stop removing; the next gateway goes on with what is left in the trash."""
        self._closing = True
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def empty_trash(self) -> None:
        """Remove what is in the trash: also what a crash or a failing disk left there."""
        async with self._emptying:
            await asyncio.to_thread(self._empty_trash)

    def _empty_trash_soon(self) -> None:
        task = asyncio.create_task(self.empty_trash(), name="empty-trash")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def collect(self, run_id: str | None, *, ended: bool = False) -> bool:
        """Remove the folders of a run (of all, for None) that nothing names or uses; partial
        folders as well if its trainer has stopped. Return False if some are still in use, so that
        the call is worth repeating."""
        found = await asyncio.to_thread(self._list_folders, run_id, ended)
        used = self._pins.folders()
        named = await self._named(run_id)
        used |= self._pins.folders()
        unnamed = [folder for folder in found if folder not in named]
        if run_id is not None and self._pins.is_resolving(run_id):
            if unnamed:
                self._checkpoints.mark(run_id)
            return not unnamed
        unused = [folder for folder in unnamed if folder not in used]
        if unused:
            await asyncio.to_thread(self._throw_away, unused)
            self._empty_trash_soon()
            await self._note(run_id, unused)
            self._log.info("collected", run_id=run_id, folders=unused)
        if ended:
            await asyncio.to_thread(self._remove_empty_run_folders, run_id)
        return len(unused) == len(unnamed)

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
        await self._database.flush()
        saved = select(checkpoints.c.folder, checkpoints.c.version)
        sampled = select(literal(""), sampling_sessions.c.version).where(
            sampling_sessions.c.state == "active", sampling_sessions.c.run_id != ""
        )
        if run_id is not None:
            saved = saved.where(checkpoints.c.run_id == run_id)
            sampled = sampled.where(sampling_sessions.c.run_id == run_id)
        return {
            relative_state_folder(Path(row["folder"]))
            if row["folder"]
            else relative_version_folder(row["version"])
            for row in await self._database.read(union_all(saved, sampled))
        }

    def _throw_away(self, folders: list[str]) -> None:
        """Rename the folders into the trash, so that nothing half removed has a name."""
        for folder in folders:
            trash = self._data_dir / folder.partition("/")[0] / _TRASH / secrets.token_hex(8)
            trash.parent.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):  # a partial folder that its writer just discarded
                (self._data_dir / folder).rename(trash)

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
                    self._log.error("not_removed", path=str(child), reason=str(error))

    def _remove_empty_run_folders(self, run_id: str | None) -> None:
        for folder in self._run_folders(run_id):
            with suppress(OSError):  # something is in it, or another collection was faster
                folder.rmdir()

    async def _note(self, run_id: str | None, removed: list[str]) -> None:
        """Record in the database which versions were removed."""
        paths = [str(self._data_dir / folder) for folder in removed]
        gone = update(weight_versions).where(weight_versions.c.path.in_(paths))
        if run_id is not None:
            gone = gone.where(weight_versions.c.run_id == run_id)
        await self._database.write(gone.values(collected_at=time.time()))


def _is_own_folder(path: Path) -> bool:
    """Return whether the path is a folder and not a link: what lies elsewhere is not ours."""
    return path.is_dir() and not path.is_symlink()
