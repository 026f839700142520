"""The database: SQLite by default, and one task that writes.

Every write goes through a queue to a single writer, which puts everything that is queued into
one transaction (group commit): under load, a hundred requests share one commit, and SQLite never
sees two writers. Reads use connections of their own.

Writes of which clients can send many go into a queue of their owner. The writer takes from these
queues in turn, so that each transaction has something of every owner, however much one of them
has sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import Executable, RowMapping, Select, Table, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from gateway.fair_queue import FairQueue
from gateway.storage.migrations import upgrade
from tandem.telemetry import get_log

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_BUSY_TIMEOUT_MS = 10_000
_MAX_BATCH = 512
_MAX_BATCH_BYTES = 32 * 2**20
"""Of the files that one transaction waits for; more only where a single file is larger."""

Row = Mapping[str, object]
FileWork = Callable[[], None]
Value = TypeVar("Value")
Record = TypeVar("Record", bound="DataclassInstance")


@dataclass(frozen=True)
class _Write:
    """Statements that are committed together, each with the rows that it is executed for."""

    statements: Sequence[tuple[Executable, Sequence[Row]]]
    before: FileWork | None = None
    after: FileWork | None = None
    done: asyncio.Future[None] | None = None
    size: int = 0


class Database:
    """Call `await open()` before use, and `await close()`, which writes what is queued."""

    def __init__(self, *, url: str) -> None:
        self._url = url
        self._is_sqlite = make_url(url).get_backend_name() == "sqlite"
        self._engine: AsyncEngine | None = None
        self._queue: deque[_Write] = deque()
        self._owner_queues: FairQueue[_Write] = FairQueue()
        self._work = asyncio.Event()
        self._closing = False
        self._writer: asyncio.Task[None] | None = None
        self._log = get_log()

    @classmethod
    def at(cls, *, url: str, data_dir: Path) -> Database:
        """Return the database of this URL; if it is empty, SQLite in the data directory."""
        return cls(url=url or f"sqlite+aiosqlite:///{data_dir / 'tandem.db'}")

    async def open(self) -> None:
        self._engine = create_async_engine(self._url)
        if self._is_sqlite:
            event.listen(self._engine.sync_engine, "connect", _prepare_sqlite)
        async with self._engine.connect() as connection:
            await connection.run_sync(upgrade)
        self._writer = asyncio.create_task(self._run_writer(), name="database-writer")

    async def close(self) -> None:
        if self._writer is not None:
            self._closing = True
            self._work.set()
            await self._writer
            self._writer = None
        if self._engine is not None:
            await self._engine.dispose()
            self._engine = None

    async def write(
        self,
        statement: Executable,
        *rows: Row,
        before: FileWork | None = None,
        owner: str = "",
        size: int = 0,
    ) -> None:
        """Execute the statement once for each of the rows; return when that is committed.

        `before` is file work of `size` bytes that must be done first. It runs in a thread; if it
        raises, nothing is written and the error is raised here. `owner` chooses the queue of an
        owner; without one, the write goes before those of all owners.
        """
        await self._committed([(statement, rows)], before=before, owner=owner, size=size)

    async def write_together(self, *statements: Executable) -> None:
        """As `write`, for several statements of which all are committed, or none."""
        await self._committed([(statement, ()) for statement in statements])

    def write_soon(
        self,
        statement: Executable,
        *rows: Row,
        before: FileWork | None = None,
        after: FileWork | None = None,
    ) -> None:
        """As `write`, without waiting; a failure is logged. `after` is file work that is done
        only once the rest is committed."""
        self._put(_Write([(statement, rows)], before=before, after=after))

    async def flush(self) -> None:
        """Return when everything queued before is committed, except writes in an owner's queue:
        their callers wait for them."""
        await self._committed([])

    async def read(self, statement: Executable) -> Sequence[RowMapping]:
        assert self._engine is not None
        async with self._engine.connect() as connection:
            return (await connection.execute(statement)).mappings().all()

    async def read_one(self, statement: Executable) -> RowMapping | None:
        rows = await self.read(statement)
        return rows[0] if rows else None

    async def read_value(self, statement: Select[Value]) -> Value:
        """Return the one value of a query that always has one, such as a count."""
        assert self._engine is not None
        async with self._engine.connect() as connection:
            return (await connection.execute(statement)).scalar_one()

    def insert_or_add(self, table: Table, *, counters: Sequence[str]) -> Executable:
        """Return a statement that inserts a row, or adds the row's counters to those of the row
        that has the same primary key."""
        insert = sqlite.insert(table) if self._is_sqlite else postgresql.insert(table)
        return insert.on_conflict_do_update(
            index_elements=list(table.primary_key),
            set_={name: table.c[name] + insert.excluded[name] for name in counters},
        )

    async def _committed(
        self,
        statements: Sequence[tuple[Executable, Sequence[Row]]],
        *,
        before: FileWork | None = None,
        owner: str = "",
        size: int = 0,
    ) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(_Write(statements, before=before, done=done, size=size), owner=owner)
        await done

    def _put(self, write: _Write, *, owner: str = "") -> None:
        if owner:
            self._owner_queues.put(owner, write)
        else:
            self._queue.append(write)
        self._work.set()

    async def _run_writer(self) -> None:
        assert self._engine is not None
        async with self._engine.connect() as connection:
            while True:
                await self._work.wait()
                batch = self._take_batch()
                if batch:
                    await self._write_batch(connection, batch)
                elif self._closing:
                    return
                else:
                    self._work.clear()

    def _take_batch(self) -> list[_Write]:
        """Take writes without an owner first: they wait only for the commit itself."""
        batch: list[_Write] = []
        while self._queue and len(batch) < _MAX_BATCH:
            batch.append(self._queue.popleft())
        taken, size = 0, 0
        while self._owner_queues and taken < _MAX_BATCH and size < _MAX_BATCH_BYTES:
            batch.append(self._owner_queues.take())
            taken, size = taken + 1, size + batch[-1].size
        return batch

    async def _write_batch(self, connection: AsyncConnection, batch: list[_Write]) -> None:
        batch = await self._do_file_work(batch)
        try:
            await _execute(connection, batch)
        except Exception:  # noqa: BLE001 - a driver's refusal of a value is no SQLAlchemyError
            # One bad row must neither fail the others nor end the writer: try each alone.
            for write in batch:
                try:
                    await _execute(connection, [write])
                except Exception as error:  # noqa: BLE001 - its caller is told, or the log
                    self._fail(write, error)
        for write in batch:
            if write.done is not None and not write.done.done():
                write.done.set_result(None)
        later = [write.after for write in batch if write.after is not None]
        if later:
            for failure in await asyncio.to_thread(_try_each, later):
                if failure is not None:  # what was committed stays; files may be left over
                    self._log.error("file_work_failed", error=str(failure))

    async def _do_file_work(self, batch: list[_Write]) -> list[_Write]:
        """Do what comes before the writes; return those that may go on."""
        work = [write.before for write in batch if write.before is not None]
        if not work:
            return batch
        errors = iter(await asyncio.to_thread(_try_each, work))
        kept = []
        for write in batch:
            failure = next(errors) if write.before is not None else None
            if failure is None:
                kept.append(write)
            else:
                self._fail(write, failure)
        return kept

    def _fail(self, write: _Write, error: Exception) -> None:
        if write.done is not None and not write.done.done():
            write.done.set_exception(error)
        else:
            statements = [str(statement) for statement, _ in write.statements]
            self._log.error("write_failed", error=str(error), statements=statements)


async def _execute(connection: AsyncConnection, batch: Sequence[_Write]) -> None:
    """Execute the writes in one transaction."""
    merged: list[tuple[Executable, list[dict[str, object]]]] = []
    for statement, rows in (pair for write in batch for pair in write.statements):
        if merged and rows and merged[-1][1] and merged[-1][0] is statement:
            merged[-1][1].extend(map(dict, rows))  # neighbours become one executemany
        else:
            merged.append((statement, list(map(dict, rows))))
    try:
        for statement, parameters in merged:
            await connection.execute(statement, parameters or None)
        await connection.commit()
    except BaseException:
        with suppress(SQLAlchemyError):
            await connection.rollback()
        raise


def from_row(type_: type[Record], row: RowMapping, **changes: object) -> Record:
    """Build a dataclass from the columns that have the names of its fields, and from `changes`."""
    make: Callable[..., Record] = type_
    values = {field.name: row[field.name] for field in fields(type_) if field.name in row}
    return make(**values | changes)


def _try_each(work: Sequence[FileWork]) -> list[Exception | None]:
    """Call each; return the error of each, None where it succeeded."""
    errors: list[Exception | None] = []
    for call in work:
        try:
            call()
            errors.append(None)
        except Exception as error:  # noqa: BLE001 - its caller is told, or the log
            errors.append(error)
    return errors


def _prepare_sqlite(connection: object, _record: object) -> None:
    cursor = connection.cursor()  # type: ignore[attr-defined]
    for pragma in (
        "journal_mode=WAL",
        "synchronous=NORMAL",
        f"busy_timeout={_BUSY_TIMEOUT_MS}",
        "foreign_keys=ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
