"""Removes from the disk what no name leads to and nobody uses.

A version or a checkpoint's folder stays while a checkpoint or an active sampling session names
it, while a run or a sampler uses it, and while somebody holds it (`gateway/holds.py`). Names
come after files and go before them, so that a crash at any point leaves at worst files without
a name; `collect` of everything, when the gateway starts, finds those.

The order of looking matters, since all this goes on meanwhile: first the disk, so that nothing
younger is touched; then what is in use; then the names (whoever saves gives up its hold only
after its name is committed); then once more what is in use (whoever reads took its hold after
the name was found).
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import select, update

from gateway.checkpoints.pins import Pins
from gateway.identifiers import folder_of, place_of_folder, place_of_version
from gateway.storage.database import Database
from gateway.storage.tables import checkpoints, sampling_sessions, weight_versions
from tandem.telemetry import get_log

_ROOTS = ("weights", "checkpoints")
_PARTIAL_PREFIX = ".partial-"
_TRASH = ".trash"


class GarbageCollector:
    """`again` is told of a run in which something stayed for the moment that one of its names
    was looked up."""

    def __init__(
        self,
        *,
        database: Database,
        data_dir: Path,
        holds: Pins,
        again: Callable[[str], None],
    ) -> None:
        self._database = database
        self._data_dir = data_dir
        self._holds = holds
        self._again = again
        self._one_at_a_time = asyncio.Lock()
        self._log = get_log()

    async def collect(self, *, run_id: str | None, partials: bool) -> bool:
        """Removes what is over of a run, or of all (None). With `partials` also what is half
        written, which is right only when nobody can be writing. False: something is still in
        use, so that this is worth repeating."""
        async with self._one_at_a_time:
            return await self._collect(run_id, partials)

    async def empty_trash(self) -> None:
        """Removes what was taken away, but not removed: we ended, or the disk refused."""
        async with self._one_at_a_time:
            await asyncio.to_thread(self._empty_trash)

    async def _collect(self, run_id: str | None, partials: bool) -> bool:
        folder = folder_of(run_id) if run_id is not None else None
        found = await asyncio.to_thread(self._look, folder, partials)
        used = self._holds.places()
        named = await self._named(run_id)
        used |= self._holds.places()
        unnamed = [place for place in found if place not in named]
        if run_id is not None and self._holds.looked_up(run_id):
            if unnamed:
                self._holds.when_looked_up(run_id, lambda: self._again(run_id))
            return not unnamed
        over = [place for place in unnamed if place not in used]
        if over:
            await asyncio.to_thread(self._remove, over)
            await self._note(run_id, set(over))
            self._log.info("collected", run_id=run_id, places=over)
        if partials:
            await asyncio.to_thread(self._remove_empty, folder)
        return len(over) == len(unnamed)

    def _look(self, folder: str | None, partials: bool) -> list[str]:
        found = []
        for run in self._run_folders(folder):
            for child in sorted(run.iterdir()):
                if partials or not child.name.startswith(_PARTIAL_PREFIX):
                    found.append(f"{run.parent.name}/{run.name}/{child.name}")
        return found

    def _run_folders(self, folder: str | None) -> list[Path]:
        found: list[Path] = []
        for root in (self._data_dir / name for name in _ROOTS):
            if folder is not None:
                found += [root / folder] if _is_own_dir(root / folder) else []
            elif root.is_dir():
                found += [p for p in sorted(root.iterdir()) if _is_own_dir(p) and p.name != _TRASH]
        return found

    async def _named(self, run_id: str | None) -> set[str]:
        await self._database.flush()
        sampled = select(sampling_sessions.c.version).where(
            sampling_sessions.c.state == "active", sampling_sessions.c.run_id != ""
        )
        saved = select(checkpoints.c.folder, checkpoints.c.version)
        if run_id is not None:
            sampled = sampled.where(sampling_sessions.c.run_id == run_id)
            saved = saved.where(checkpoints.c.run_id == run_id)
        named = {place_of_version(row["version"]) for row in await self._database.read(sampled)}
        for row in await self._database.read(saved):
            named.add(
                place_of_folder(Path(row["folder"]))
                if row["folder"]
                else place_of_version(row["version"])
            )
        return named

    def _remove(self, places: list[str]) -> None:
        """First out of the way, by one rename, so that nothing half removed has a name."""
        for place in places:
            root = self._data_dir / place.partition("/")[0]
            trash = root / _TRASH / f"{secrets.token_hex(8)}"
            trash.parent.mkdir(exist_ok=True)
            try:
                (self._data_dir / place).rename(trash)
            except FileNotFoundError:  # two rounds met
                continue
            self._delete(trash)
        self._empty_trash()

    def _delete(self, trash: Path) -> None:
        try:
            shutil.rmtree(trash) if _is_own_dir(trash) else trash.unlink()
        except OSError as error:  # it stays in the trash, which is emptied again later
            self._log.error("not_removed", path=str(trash), reason=str(error))

    def _empty_trash(self) -> None:
        for trash in (self._data_dir / root / _TRASH for root in _ROOTS):
            if not _is_own_dir(trash):
                continue
            for child in trash.iterdir():
                self._delete(child)
            if not any(trash.iterdir()):
                trash.rmdir()

    def _remove_empty(self, folder: str | None) -> None:
        for run in self._run_folders(folder):
            if not any(run.iterdir()):
                run.rmdir()

    async def _note(self, run_id: str | None, removed: set[str]) -> None:
        here = select(weight_versions.c.name).where(weight_versions.c.collected_at.is_(None))
        if run_id is not None:
            here = here.where(weight_versions.c.run_id == run_id)
        rows = await self._database.read(here)
        names = [row["name"] for row in rows if place_of_version(row["name"]) in removed]
        if names:
            await self._database.write(
                update(weight_versions)
                .where(weight_versions.c.name.in_(names))
                .values(collected_at=time.time())
            )


def _is_own_dir(path: Path) -> bool:
    """A folder and no link to one: what lies elsewhere is not ours to remove."""
    return path.is_dir() and not path.is_symlink()
