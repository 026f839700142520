"""Commits a batch of writes in one transaction, in the writer's thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Executable, text
from sqlalchemy.exc import DBAPIError

from gateway.storage.drivers import typed
from tandem.errors import StorageFailed

_TRANSACTION = text("SELECT CAST(pg_current_xact_id() AS text)")
_TRANSACTION_OF_LEADER = text(
    "SELECT CAST(pg_current_xact_id() AS text), epoch FROM gateway_lease FOR SHARE"
)
_OUTCOME = text("SELECT pg_xact_status(CAST(:number AS xid8))")
_COMMIT_UNKNOWN = 20.0
"""Seconds to ask for a commit's outcome after its connection broke."""
_RETRY_COMMIT_UNKNOWN = 0.2

Row = Mapping[str, object]
FileWork = Callable[[], None]


@dataclass(eq=False)
class Write:
    statements: Sequence[tuple[Executable, Sequence[Row]]]
    before: FileWork | None = None
    undo: FileWork | None = None
    after: FileWork | None = None
    size: int = 0
    durable: bool = False
    in_order: bool = False
    done: asyncio.Future[None] | None = None
    settled: Callable[[], object] | None = None
    refused: Callable[[], object] | None = None


def write_batch(
    connection: Connection, batch: Sequence[Write], epoch: int
) -> list[Exception | None]:
    """Do the file work, then commit, and undo the file work of failed writes. Return each write's
    error."""
    errors = errors_of([write.before for write in batch])
    ready = [index for index, error in enumerate(errors) if error is None]
    committed = _commit(connection, [batch[index] for index in ready], epoch)
    for index, error in zip(ready, committed, strict=True):
        errors[index] = error
    failed = [write for write, error in zip(batch, errors, strict=True) if error is not None]
    errors_of([write.undo for write in failed])  # the write's own error counts, not these
    return errors


def _sync_commits(connection: Connection, *, durable: bool) -> None:
    """Set whether SQLite syncs its log at each commit. That makes a single write ten times
    slower."""
    is_sqlite = connection.dialect.name == "sqlite"  # PostgreSQL syncs at every commit
    if is_sqlite and connection.info.get("durable", False) != durable:
        level = "FULL" if durable else "NORMAL"
        with connection.begin():  # the transaction begins with its first change, after the PRAGMA
            connection.exec_driver_sql(f"PRAGMA synchronous={level}")
        connection.info["durable"] = durable


def _commit(connection: Connection, batch: Sequence[Write], epoch: int) -> list[Exception | None]:
    """Execute the writes in one transaction and return each write's error. If the connection breaks
    during the commit, ask PostgreSQL for the outcome."""
    merged: list[tuple[Executable, list[dict[str, object]]]] = []
    for statement, rows in (pair for write in batch for pair in write.statements):
        parameters = list(map(dict, rows))
        last, before = merged[-1] if merged else (None, [])
        alike = before and parameters and before[0].keys() == parameters[0].keys()
        if last is statement and alike:
            before.extend(parameters)  # merge equal neighbours into one executemany
        else:
            merged.append((statement, parameters))
    number = None
    try:
        _sync_commits(connection, durable=any(write.durable for write in batch))
        with connection.begin():
            for statement, parameters in merged:
                connection.execute(statement, parameters or None)
            if merged and connection.dialect.name == "postgresql":
                number = _end(connection, epoch)
    except Exception as error:  # noqa: BLE001 - a driver's refusal is no SQLAlchemyError
        failure = typed(error)
        if number is not None and _was_committed(connection, number):
            return [None] * len(batch)
        if len(batch) == 1 or isinstance(failure, StorageFailed):
            return [failure if write.statements else None for write in batch]
        # One bad row must not fail the others, so try each alone.
        return [failure for write in batch for failure in _commit(connection, [write], epoch)]
    return [None] * len(batch)


def _end(connection: Connection, epoch: int) -> str:
    """Return the transaction's number. Raise `StorageFailed` if another gateway is the leader. The
    row lock keeps it from doing so before the commit."""
    if not epoch:
        return str(connection.execute(_TRANSACTION).scalar_one())
    number, newest = connection.execute(_TRANSACTION_OF_LEADER).one()
    if newest != epoch:
        raise StorageFailed("another gateway has taken over from this one; ask that one")
    return str(number)


def _was_committed(connection: Connection, number: str) -> bool:
    """Return whether PostgreSQL committed the transaction. False if it stays unreachable."""
    deadline = time.monotonic() + _COMMIT_UNKNOWN
    while time.monotonic() < deadline:
        try:
            with connection.begin():
                outcome = connection.execute(_OUTCOME, {"number": number}).scalar()
            if outcome != "in progress":
                return bool(outcome == "committed")
        except DBAPIError:
            pass  # still unreachable
        time.sleep(_RETRY_COMMIT_UNKNOWN)
    return False


def errors_of(work: Sequence[FileWork | None]) -> list[Exception | None]:
    def error_of(call: FileWork | None) -> Exception | None:
        try:
            if call is not None:
                call()
        except Exception as error:  # noqa: BLE001 - its caller is told, or the log
            return typed(error)
        return None

    return [error_of(call) for call in work]
