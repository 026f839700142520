"""Backs up and restores a data directory's database: `python -m gateway.admin.backup`.

`tandem backup` and `tandem restore` start it.

A backup is a folder with a consistent copy of the database, made while the gateway serves, the
records of all runs, and the file lists of all checkpoints and weight versions, but no weights.
`backup.json` is written last.

A restored database does not know later checkpoints and versions. They stay, and the answer names
their folders. It forgets versions that had no name, because a later checkpoint may name them.
Active runs and sessions end. Replaced data moves to `DATA/replaced`."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError
from sqlalchemy import delete, make_url, select, update

from gateway.admin.request import answer_request
from gateway.admin.unused_database import unused_database
from gateway.checkpoints.catalog import CheckpointCatalog, checkpoint_of
from gateway.checkpoints.collector import GarbageCollector
from gateway.checkpoints.pins import Pins
from gateway.checkpoints.versions import FILE_LISTS, files_of
from gateway.metrics import Metrics
from gateway.owners.auth.audit import AuditLog, Entry
from gateway.owners.limits import Quotas
from gateway.storage.data_directory import locked_data_directory, write_file
from gateway.storage.database import Database
from gateway.storage.drivers import is_postgresql, restored_copy
from gateway.storage.migrations import check_revision
from gateway.storage.tables import (
    checkpoints,
    operations,
    runs,
    sampling_sessions,
    sessions,
    snapshots,
    weight_versions,
    workers,
)
from tandem import __version__
from tandem.errors import CheckpointDamaged, GatewayRestarted, InvalidRequest
from tandem.settings.gateway import GatewaySettings
from tandem.weights.store import fsync_path

_ABOUT = "backup.json"
_DATABASE = "tandem.db"
_MANIFESTS = "manifests"
_RECORDS = "records"
_REASON = "the database was restored from a backup; create the run again, from a checkpoint"
_REPLACED = ("snapshots", "operations", "results")


class BackupRequest(BaseModel):
    """`folder` is the backup. Restoring PostgreSQL needs none."""

    action: Literal["backup", "restore"]
    folder: Path | None = None


class About(BaseModel):
    """`at` is in seconds since 1970. `revision` is empty for PostgreSQL, which is not copied.
    `folders` is the number of checkpoints and weight versions in the file lists."""

    version: str
    revision: str
    at: float
    folders: int


class Restored(BaseModel):
    """The folders unknown to the restored database, the checkpoints without files, and the place of
    the replaced database, if any."""

    unknown: list[str]
    missing: list[str]
    replaced: str


def back_up(folder: Path, settings: GatewaySettings) -> About:
    """Make a backup in a new folder, which appears when it is complete."""
    if folder.exists():
        raise InvalidRequest(f"{folder} exists already; name a new folder")
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700, parents=True)
    try:
        about = _fill(partial, settings)
        partial.rename(folder)
    except BaseException:  # such as a full disk, which it would keep full
        shutil.rmtree(partial, ignore_errors=True)
        raise
    fsync_path(folder.parent)
    return about


def _fill(partial: Path, settings: GatewaySettings) -> About:
    data_dir, url = settings.data_dir, settings.database_url
    revision = ""
    if not is_postgresql(url):
        revision = _copy_sqlite(_sqlite_file(url, data_dir), partial / _DATABASE)
    found = 0
    for file in _manifests(data_dir):
        target = partial / _MANIFESTS / file.relative_to(data_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # the gateway has removed the version
            shutil.copyfile(file, target)
            found += 1
    _copy_missing(_records(data_dir), data_dir, partial / _RECORDS)
    about = About(version=__version__, revision=revision, at=time.time(), folders=found)
    write_file(partial / _ABOUT, about.model_dump_json().encode(), synced=True)
    return about


async def restore(folder: Path | None, settings: GatewaySettings) -> Restored:
    """Replace the database by a backup's and end everything active in it. PostgreSQL is restored by
    its own tools before. Nothing is deleted from the data directory."""
    data_dir, url = settings.data_dir, settings.database_url
    if is_postgresql(url) != (folder is None):
        raise InvalidRequest(
            "name the folder of a backup"
            if folder is None
            else "PostgreSQL is restored by its own tools (pg_restore); then run `tandem restore` "
            "without a folder"
        )
    with locked_data_directory(data_dir):
        replaced = await asyncio.to_thread(_replace_sqlite, folder, settings) if folder else ""
        async with unused_database(settings) as database:
            await _forget_what_went_on(database)
            collector = _collector(database, settings)
            await collector.find_unknown()
            unknown = sorted(collector.unknown)
            count = str(len(unknown))
            entry = Entry.of_local("organization_restore", str(folder or ""), unknown=count)
            AuditLog(database=database).record(entry)
            missing = await _missing(database, data_dir)
            return Restored(unknown=unknown, missing=missing, replaced=replaced)


def _sqlite_file(url: str, data_dir: Path) -> Path:
    return Path(make_url(url).database or "") if url else data_dir / _DATABASE


def _copy_sqlite(source: Path, target: Path) -> str:
    if not source.is_file():
        raise InvalidRequest(f"there is no database {source}")
    uri = f"{source.resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as live, closing(sqlite3.connect(target)) as copy:
        try:
            live.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.DatabaseError as error:  # also for a full disk
            raise InvalidRequest(f"{source} cannot be copied: {error}") from error
        revision = _check(copy, source)
    fsync_path(target)
    return revision


def _check(database: sqlite3.Connection, file: Path) -> str:
    """Return a database's revision. Raises `InvalidRequest` for a damaged one, and
    `UnknownSchema`."""
    try:
        (said,) = database.execute("PRAGMA quick_check(1)").fetchone()
        (revision,) = database.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.DatabaseError as error:
        raise InvalidRequest(f"{file} is not a database of Tandem: {error}") from error
    if said != "ok":
        raise InvalidRequest(f"{file} is damaged: {said}")
    check_revision(str(revision), str(file))
    return str(revision)


def _manifests(folder: Path) -> Iterator[Path]:
    for root in ("weights", "checkpoints"):
        for run in folder.glob(f"{root}/[!.]*"):  # a deeper pattern fails for a removed folder
            for name in FILE_LISTS:
                yield from run.glob(f"[!.]*/{name}")


def _records(folder: Path) -> Iterator[Path]:
    for run in folder.glob("runs/[!.]*"):
        yield from run.glob("record/[!.]*")


def _copy_missing(files: Iterator[Path], source: Path, target: Path) -> None:
    for file in files:
        copy = target / file.relative_to(source)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # the gateway has removed the run
                shutil.copyfile(file, copy)


def _replace_sqlite(folder: Path, settings: GatewaySettings) -> str:
    data_dir = settings.data_dir
    try:
        About.model_validate_json((folder / _ABOUT).read_bytes())
    except (OSError, ValidationError) as error:
        raise InvalidRequest(f"{folder} is not a backup of Tandem") from error
    source, target = folder / _DATABASE, _sqlite_file(settings.database_url, data_dir)
    if not source.is_file():
        raise InvalidRequest(f"{folder} has no database; it is a backup beside PostgreSQL")
    with closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)) as copy:
        _check(copy, source)
    partial = restored_copy(target)
    try:
        shutil.copyfile(source, partial)
        fsync_path(partial)
    except OSError:  # such as a full disk, which the copy would keep full
        partial.unlink(missing_ok=True)
        raise
    # The database goes first: without it, but with the copy, no gateway starts (`make_engine`).
    old = [target, *(p for p in target.parent.glob(f"{target.name}*") if p != target)]
    old += [place / name for place in {data_dir, settings.private} for name in _REPLACED]
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    aside = settings.private / "replaced" / f"{moment}-{secrets.token_hex(2)}"
    for path in old:
        if path.exists():
            aside.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.move(path, aside / path.name)
    partial.rename(target)
    fsync_path(target.parent)
    _copy_missing(_records(folder / _RECORDS), folder / _RECORDS, data_dir)
    for file in _manifests(folder / _MANIFESTS):
        here = data_dir / file.relative_to(folder / _MANIFESTS)
        if here.parent.is_dir() and not here.exists():
            shutil.copyfile(file, here)
    return str(aside) if aside.exists() else ""


async def _forget_what_went_on(database: Database) -> None:
    """End everything active at the time of the copy, and forget data that may have changed
    since."""
    now = time.time()
    why = {"error_type": GatewayRestarted.type}
    named = select(checkpoints.c.version)
    await database.write_together(
        update(sessions)
        .where(sessions.c.state == "active")
        .values(state="expired", reason="expired", detail=_REASON, ended_at=now),
        update(runs)
        .where(runs.c.state == "active")
        .values(state="ended", reason=_REASON, ended_at=now, **why),
        update(sampling_sessions)
        .where(sampling_sessions.c.state == "active")
        .values(state="ended", ended_at=now),
        update(operations)
        .where(operations.c.ended_at.is_(None))
        .values(state="failed", error=_REASON, ended_at=now, **why),
        delete(workers),  # the gateway stops processes without a row
        delete(snapshots),
        delete(weight_versions).where(
            weight_versions.c.collected_at.is_(None), weight_versions.c.name.not_in(named)
        ),
        update(checkpoints).values(expired_at=None),
        durable=True,
    )


def _collector(database: Database, settings: GatewaySettings) -> GarbageCollector:
    return GarbageCollector(
        database=database,
        data_dir=settings.data_dir,
        private_dir=settings.private,
        checkpoints=CheckpointCatalog(
            database=database,
            pins=Pins(),
            limits=Quotas(settings=settings.limit, metrics=Metrics()),
        ),
    )


async def _missing(database: Database, data_dir: Path) -> list[str]:
    missing = []
    async for rows in database.read_in_batches(select(checkpoints), checkpoints.c.path):
        for checkpoint in map(checkpoint_of, rows):
            try:
                files_of(checkpoint, data_dir / checkpoint.relative_folder)
            except CheckpointDamaged:
                missing.append(str(checkpoint.path))
    return missing


def _answer(request: BackupRequest, settings: GatewaySettings) -> dict[str, object]:
    if request.action == "restore":
        return asyncio.run(restore(request.folder, settings)).model_dump()
    assert request.folder is not None
    return back_up(request.folder, settings).model_dump()


if __name__ == "__main__":
    sys.exit(answer_request(BackupRequest, _answer))
