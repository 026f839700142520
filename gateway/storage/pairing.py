"""Whether the database and the data directory belong together.

Both hold the same random id. They do not if the database was lost or replaced, or if
`TANDEM_DATABASE_URL` names another one: such a database knows nothing of the files in the
directory, and nothing must be removed on its word.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from sqlalchemy import insert, select

from gateway.storage.data_directory import write_private
from gateway.storage.database import Database
from gateway.storage.tables import data_directory
from tandem.errors import StorageFailed

MISMATCH = (
    "the database does not belong to this data directory: it was lost or replaced, or "
    "TANDEM_DATABASE_URL names another one. Until you decide, nothing is removed from the "
    "directory. Stop the gateway and give it the right database; or, if that is lost, run "
    "`tandem checkpoints adopt`, which makes rows of the checkpoints in the directory and lets "
    "the two belong together from then on"
)
_NAME = "data_id"
_FILES = (
    "weights/[!.]*/*",
    "checkpoints/[!.]*/*",
    "quarantine/*/*/*",
    "snapshots/*/*",
    "operations/*/*",
)


async def check_pair(database: Database, data_dir: Path) -> bool:
    """Return whether the two belong together. Two that have no id yet, or no file that could be
    lost, belong together from now on."""
    known, here = await _id_of(database), _id_in(data_dir)
    if known and known == here:
        return True
    has_files = await asyncio.to_thread(_has_files, data_dir)
    if (known or here) and has_files:
        return False
    await pair(database, data_dir)
    return True


async def pair(database: Database, data_dir: Path) -> None:
    """Let the database and the directory belong together from now on. Raises `StorageFailed`."""
    known = await _id_of(database)
    id_ = known or _id_in(data_dir) or secrets.token_hex(16)
    if not known:
        await database.write(insert(data_directory), {"id": id_}, durable=True)
    try:
        write_private(data_dir / _NAME, f"{id_}\n".encode())
    except OSError as error:
        raise StorageFailed(
            f"the data directory cannot be written ({error.strerror}); try again when it can"
        ) from error


def _has_files(data_dir: Path) -> bool:
    return any(any(data_dir.glob(pattern)) for pattern in _FILES)


async def _id_of(database: Database) -> str:
    row = await database.read_one(select(data_directory.c.id))
    return row["id"] if row is not None else ""


def _id_in(data_dir: Path) -> str:
    try:
        return (data_dir / _NAME).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""
