"""The tests' own PostgreSQL server, on a Unix socket in a temporary folder.

Tests with the fixture `each_database` run on SQLite and PostgreSQL."""

from __future__ import annotations

import getpass
import hashlib
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.waiting import PATIENCE

if TYPE_CHECKING:  # all tests import this module, even without a gateway
    from psycopg import Connection

    from gateway.storage.database import Database

_SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "max_connections": "300",
    "shared_buffers": "16MB",
    "lc_messages": "C",
}


@cache
def programs() -> Path | None:
    """Return None without PostgreSQL."""
    found = shutil.which("initdb")
    folders = [*Path("/usr/lib/postgresql").glob("*/bin")]
    newest = max(folders, key=lambda folder: int(folder.parent.name), default=None)
    return newest or (Path(found).resolve().parent if found else None)


class Postgres:
    """As root, its user is `postgres`, because it refuses root."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._user = "postgres" if os.getuid() == 0 else getpass.getuser()
        if os.getuid() == 0:
            shutil.chown(folder, "postgres")
        # Order texts like a dictionary, as most servers do, not by bytes.
        order = ("--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=en")
        self._run("initdb", "--no-sync", "--auth=trust", "--encoding=UTF8", *order)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://{self._user}@/{database}?host={self._folder}"

    def start(self) -> None:
        options = " ".join(f"-c {name}={value!r}" for name, value in _SETTINGS.items())
        log = self._folder / "log"
        self._run("pg_ctl", "-w", "-o", f"{options} -k {self._folder}", "-l", str(log), "start")

    def stop(self, mode: str = "fast") -> None:
        self._run("pg_ctl", "-w", "-m", mode, "stop")

    def database_for(self, data_dir: Path) -> str:
        name = _name_for(data_dir)
        with _connect(self.url(), autocommit=True) as connection:
            known = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name])
            if known.fetchone() is None:
                connection.execute(f'CREATE DATABASE "{name}"')
        return self.url(name)

    def drop_database_of(self, data_dir: Path) -> None:
        with _connect(self.url(), autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{_name_for(data_dir)}" WITH (FORCE)')

    def _run(self, program: str, *arguments: str) -> None:
        folder = programs()
        assert folder is not None
        done = subprocess.run(
            [folder / program, "-D", self._folder / "data", *arguments],
            user=self._user if os.getuid() == 0 else None,
            extra_groups=[] if os.getuid() == 0 else None,
            cwd=self._folder,
            stdout=subprocess.PIPE if program != "pg_ctl" else subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, (done.stdout or b"").decode()


def _name_for(data_dir: Path) -> str:
    return f"d{hashlib.sha256(str(data_dir).encode()).hexdigest()[:16]}"


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    folder = Path(tempfile.mkdtemp(prefix="tandem-postgres-"))
    server = Postgres(folder)
    try:
        server.start()
        try:
            yield server
        finally:
            server.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_server: Postgres | None = None


@contextmanager
def used_for_all(server: Postgres | None) -> Iterator[None]:
    """Let `url_for` use this server during the block. None means SQLite."""
    global _server
    before, _server = _server, server
    try:
        yield
    finally:
        _server = before


on_sqlite = pytest.mark.parametrize("each_database", ["sqlite"], indirect=True)
"""For a test that looks into SQLite, in a module with `each_database`."""


def url_for(data_dir: Path) -> str:
    """Return a data directory's database URL, empty for SQLite."""
    return _server.database_for(data_dir) if _server is not None else ""


def lose_database(data_dir: Path) -> None:
    if _server is not None:
        _server.drop_database_of(data_dir)
    else:
        (data_dir / "tandem.db").unlink()


def _connect(url: str, *, autocommit: bool = False) -> Connection:
    import psycopg

    return psycopg.connect(url, autocommit=autocommit)


@contextmanager
def locked_database(data_dir: Path) -> Iterator[None]:
    """Let another process hold the write lock during the block. Reads continue."""
    if url := url_for(data_dir):
        with _connect(url) as other:
            tables = other.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
            names = ", ".join(f'"{name}"' for (name,) in tables)
            other.execute(f"LOCK TABLE {names} IN EXCLUSIVE MODE")
            yield
    else:
        with closing(sqlite3.connect(data_dir / "tandem.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield


async def wait_for_no_lock(database: Database) -> None:
    """Let writes fail at once while another process writes."""
    from sqlalchemy import text

    setting = "SET lock_timeout = 1" if _server is not None else "PRAGMA busy_timeout = 0"
    await database.write(text(setting))
