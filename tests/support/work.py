"""Counts work instead of timing it."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import event
from sqlalchemy.engine import Engine

_GRAIN = 10


def calls_in(function: Callable[[], object]) -> int:
    calls = 0

    def count(_frame, what: str, _argument) -> None:
        nonlocal calls
        calls += what in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


@dataclass
class DatabaseWork:
    """`steps` of SQLite's virtual machine (0 for PostgreSQL), and the most rows that one statement
    wrote."""

    steps: int = 0
    most_rows: int = 0


@contextmanager
def database_work() -> Iterator[DatabaseWork]:
    """Count the work of databases opened in the block."""
    work = DatabaseWork()

    def connected(connection, _record) -> None:
        def step() -> None:
            work.steps += _GRAIN

        if isinstance(connection, sqlite3.Connection):
            connection.set_progress_handler(step, _GRAIN)

    def executed(_connection, cursor, *_statement) -> None:
        work.most_rows = max(work.most_rows, cursor.rowcount)

    event.listen(Engine, "connect", connected)
    event.listen(Engine, "after_cursor_execute", executed)
    try:
        yield work
    finally:
        event.remove(Engine, "connect", connected)
        event.remove(Engine, "after_cursor_execute", executed)
