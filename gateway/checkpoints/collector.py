"""Removes unused, unnamed weight versions and checkpoint folders.

It removes released folders, known versions without a name, partial folders of a crashed save, and
failed saves of this gateway. Unknown folders stay, because the database may be an older copy and
the folder a user's checkpoint. `warnings` reports them to the operator.

A folder stays while a checkpoint, an active sampling session or a pin needs it. Files are written
before their name and removed after it, so a crash leaves at worst files without a name.
Saves and reads go on meanwhile, so the order matters:

1. List the disk, so that no younger folder is touched.
2. Read the pins.
3. Read the names. A save unpins its folder after its name is committed.
4. Read the pins again. A reader pins a folder after it found the name.

Collection renames a folder into the trash. One task empties the trash later."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import delete, literal, select, union_all, update

from gateway.checkpoints.catalog import CheckpointCatalog
from gateway.identifiers import relative_version_folder, run_folder_name
from gateway.storage.data_directory import relative_path
from gateway.storage.database import Database
from gateway.storage.tables import (
    checkpoints,
    released_folders,
    runs,
    sampling_sessions,
    weight_versions,
)
from tandem.errors import describe
from tandem.telemetry import get_log

_ROOTS = ("weights", "checkpoints")
_PARTIAL_PREFIX = ".partial-"
_TRASH = ".trash"
_MOST_NAMED = 5
UNKNOWN = (
    "the database does not know these folders of the data directory, so Tandem never removes them. "
    "If it is the wrong database or an older copy, stop the gateway and give it the right one. "
    "Otherwise remove the folders yourself, or move them elsewhere"
)


@dataclass(eq=False, kw_only=True)
class GarbageCollector:
    database: Database
    data_dir: Path
    private_dir: Path
    checkpoints: CheckpointCatalog

    def __post_init__(self) -> None:
        self.unknown: set[str] = set()
        """Paths in the data directory that the database does not know; absolute elsewhere."""
        self._pins = self.checkpoints.pins
        self._emptying = asyncio.Lock()
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_log()

    async def collect_all(self) -> None:
        """Remove leftovers of an earlier gateway. Call it before anything runs."""
        await self.collect(None, ended=True)
        await self.find_unknown()
        self.empty_trash_soon()

    async def close(self) -> None:
        """Stop removing. The next gateway empties the rest of the trash."""
        self._closing = True
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def empty_trash(self) -> None:
        async with self._emptying:
            await asyncio.to_thread(self._empty_trash)

    def empty_trash_soon(self) -> None:
        if len(self._tasks) > 1:  # one runs, and the next will find everything
            return
        task = asyncio.create_task(self.empty_trash(), name="empty-trash")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def collect(self, run_id: str | None, *, ended: bool = False) -> bool:
        """Remove the unused, unnamed folders of a run (None: of all), with partial ones if its
        trainer `ended`. Return False if some are in use and worth another call."""
        found = await asyncio.to_thread(self._list_folders, run_id, ended)
        used = self._pins.folders()
        if not await self.database.flush():  # unwritten rows may name them
            if run_id is not None:
                self.checkpoints.mark(run_id)
            return False
        named, known = await self._named(run_id), await self._known(run_id)
        known |= self.checkpoints.given_up.get(run_id or "", set())
        used |= self._pins.folders()
        used |= {f"{path.parent}/{_PARTIAL_PREFIX}{path.name}" for path in map(Path, used)}
        unnamed = [folder for folder in found if folder not in named]
        if run_id is not None and self._pins.is_resolving(run_id):
            if unnamed:
                self.checkpoints.mark(run_id)
            return not unnamed
        unused = [folder for folder in unnamed if folder not in used]
        removable = [f for f in unused if f in known or _is_partial(f)]
        if removable:
            removed, refused = await asyncio.to_thread(self._put_away, removable)
            self.empty_trash_soon()
            await self._note(run_id, removed)
            self._log.info("collected", run_id=run_id, folders=len(removed), first=removed[:3])
            if refused:
                return False
        if ended:
            await asyncio.to_thread(self._remove_empty_run_folders, run_id)
            self.checkpoints.given_up.pop(run_id or "", None)
        return len(unused) == len(unnamed)

    async def warnings(self) -> list[str]:
        self.unknown = await asyncio.to_thread(self._still_there)
        if not self.unknown:
            return []
        first = sorted(self.unknown)[:_MOST_NAMED]
        more = len(self.unknown) - len(first)
        names = ", ".join(first) + (f" and {more} more" if more else "")
        return [f"{names}: {UNKNOWN}"]

    async def find_unknown(self) -> None:
        found = await asyncio.to_thread(self._list_folders, None, False)
        of_runs = await asyncio.to_thread(self._list_folders_of_runs)
        known = self._pins.folders()
        await self.database.flush()
        known |= await self._named(None) | await self._known(None) | self._pins.folders()
        rows = await self.database.read(select(runs.c.id)) if found or of_runs else []
        known_runs = {run_folder_name(row["id"]) for row in rows}
        unknown = {path for path in of_runs if Path(path).name not in known_runs}
        for folder in set(found) - known:
            run = Path(folder).parent
            unknown.add(folder if run.name in known_runs else str(run))
        self.unknown = unknown
        if unknown:
            self._log.warning("unknown_folders", folders=sorted(unknown), hint=UNKNOWN)

    def _still_there(self) -> set[str]:
        return {folder for folder in self.unknown if (self.data_dir / folder).is_dir()}

    def _list_folders_of_runs(self) -> list[str]:
        found = [
            path
            for name in ("snapshots", "runs", "jobs")
            for path in self.data_dir.glob(f"{name}/*")
        ]
        found += (self.private_dir / "operations").glob("*")
        return [
            relative_path(path, self.data_dir) for path in sorted(found) if _is_own_folder(path)
        ]

    def _list_folders(self, run_id: str | None, partials: bool) -> list[str]:
        found: list[Path] = []
        for run in self._run_folders(run_id):
            with suppress(FileNotFoundError):  # another collection just removed it
                found += sorted(run.iterdir())
        return [
            str(folder.relative_to(self.data_dir))
            for folder in found
            if partials or not _is_partial(folder.name)
        ]

    def _run_folders(self, run_id: str | None) -> list[Path]:
        name = run_folder_name(run_id) if run_id is not None else "*"
        found = [path for root in _ROOTS for path in sorted(self.data_dir.glob(f"{root}/{name}"))]
        return [path for path in found if _is_own_folder(path) and path.name != _TRASH]

    async def _named(self, run_id: str | None) -> set[str]:
        saved = select(checkpoints.c.folder, checkpoints.c.version)
        sampled = select(literal(""), sampling_sessions.c.version).where(
            sampling_sessions.c.state == "active", sampling_sessions.c.run_id != ""
        )
        if run_id is not None:
            saved = saved.where(checkpoints.c.run_id == run_id)
            sampled = sampled.where(sampling_sessions.c.run_id == run_id)
        rows = await self.database.read(union_all(saved, sampled))
        return {row["folder"] or relative_version_folder(row["version"]) for row in rows}

    async def _known(self, run_id: str | None) -> set[str]:
        released = select(released_folders.c.folder, literal("").label("name"))
        versions = select(literal(""), weight_versions.c.name).where(
            weight_versions.c.collected_at.is_(None)
        )
        if run_id is not None:
            released = released.where(released_folders.c.run_id == run_id)
            versions = versions.where(weight_versions.c.run_id == run_id)
        rows = await self.database.read(union_all(released, versions))
        return {row["folder"] or relative_version_folder(row["name"]) for row in rows}

    def _put_away(self, folders: list[str]) -> tuple[list[str], list[str]]:
        """Rename folders into the trash. Return the renamed folders and the failed ones."""
        removed, refused = [], []
        for folder in folders:
            try:
                with suppress(FileNotFoundError):  # its writer discarded the partial folder
                    self._throw_away(folder)
                removed.append(folder)
            except OSError as error:  # it stays and is tried again
                self._log.error("not_put_away", folder=folder, reason=describe(error))
                refused.append(folder)
        return removed, refused

    def _throw_away(self, folder: str) -> None:
        trash = self.data_dir / folder.partition("/")[0] / _TRASH
        trash.mkdir(parents=True, exist_ok=True)
        (self.data_dir / folder).rename(trash / secrets.token_hex(8))

    def _empty_trash(self) -> None:
        for trash in (self.data_dir / root / _TRASH for root in _ROOTS):
            if not _is_own_folder(trash):
                continue
            for child in trash.iterdir():
                if self._closing:
                    return
                try:
                    shutil.rmtree(child) if _is_own_folder(child) else child.unlink()
                except OSError as error:  # it stays in the trash until the next time
                    self._log.error("not_removed", path=str(child), reason=describe(error))

    def _remove_empty_run_folders(self, run_id: str | None) -> None:
        for folder in self._run_folders(run_id):
            with suppress(OSError):  # not empty, or already removed
                folder.rmdir()

    async def _note(self, run_id: str | None, removed: list[str]) -> None:
        gone = update(weight_versions).where(weight_versions.c.path.in_(removed))
        if run_id is not None:
            gone = gone.where(weight_versions.c.run_id == run_id)
        await self.database.write_together(
            gone.values(collected_at=time.time()),
            delete(released_folders).where(released_folders.c.folder.in_(removed)),
        )


def _is_partial(folder: str) -> bool:
    return Path(folder).name.startswith(_PARTIAL_PREFIX)


def _is_own_folder(path: Path) -> bool:
    """Return whether the path is a folder and no link, because a link's target is not ours."""
    return path.is_dir() and not path.is_symlink()
