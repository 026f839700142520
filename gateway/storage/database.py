"""The database: SQLite by default, and one task that writes.

Every write goes through a queue to a single writer, which puts all that waits into one
transaction (group commit): under load, a hundred requests share one commit, and SQLite never
sees two writers. Reads use connections of their own.

What clients can send much of is put into the lane of its owner, and lanes take turns: the next
transaction has something of everybody, however much one of them has sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Executable, RowMapping, Select, event, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from gateway.fair_queue import FairQueue
from gateway.storage.migrations import upgrade
from tandem.telemetry import get_log

_BUSY_TIMEOUT_MS = 10_000
_MAX_BATCH = 512
_MAX_BATCH_BYTES = 32 * 2**20
"""Of the files that one transaction waits for; more only where a single one is larger."""

Row = Mapping[str, object]
Value = TypeVar("Value")


@dataclass(frozen=True)
class _Write:
    statement: Executable | None
    rows: Sequence[Row]
    before: Callable[[], None] | None
    after: Callable[[], None] | None
    done: asyncio.Future[None] | None
    more: Sequence[Executable] = ()
    size: int = 0


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


class Database:
    """Open it with `await open()`, end it with `await close()`, which writes what waits."""

    def __init__(self, *, url: str) -> None:
        self._url = url
        self._engine: AsyncEngine | None = None
        self._common: deque[_Write] = deque()
        self._lanes: FairQueue[_Write] = FairQueue()
        self._work = asyncio.Event()
        self._closing = False
        self._writer: asyncio.Task[None] | None = None
        self._log = get_log()

    @classmethod
    def at(cls, *, url: str, data_dir: Path) -> Database:
        """`url` empty: SQLite under the data directory."""
        return cls(url=url or f"sqlite+aiosqlite:///{data_dir / 'tandem.db'}")

    async def open(self) -> None:
        engine = create_async_engine(self._url)
        if make_url(self._url).get_backend_name() == "sqlite":
            event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        self._engine = engine
        async with engine.connect() as connection:
            await connection.run_sync(_upgrade)
        self._writer = asyncio.create_task(self._write_all(), name="database-writer")

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
        before: Callable[[], None] | None = None,
        lane: str = "",
        size: int = 0,
    ) -> None:
        """Returns when the statement is committed, executed once for each of the rows.

        `before` is file work of `size` bytes that has to be done first; it runs in a thread,
        and when it raises, nothing is written and the error is raised here. `lane` is the owner
        of what is written; what has none goes before all lanes.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(_Write(statement, rows, before, None, done, size=size), lane=lane)
        await done

    async def write_together(self, *statements: Executable) -> None:
        """As `write`, for several statements of which all are committed, or none."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(_Write(None, (), None, None, done, more=statements))
        await done

    def write_soon(
        self,
        statement: Executable | None,
        *rows: Row,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        """As `write`, without waiting; a failure is logged. `after` is file work that may only
        be done once the rest is committed."""
        self._put(_Write(statement, rows, before, after, None))

    async def flush(self) -> None:
        """Returns when all that was handed over before is committed, but for what is in lanes:
        those who put it there wait for it themselves."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(_Write(None, (), None, None, done))
        await done

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

    async def _write_all(self) -> None:
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

    def _put(self, write: _Write, *, lane: str = "") -> None:
        if lane:
            self._lanes.put(lane, write)
        else:
            self._common.append(write)
        self._work.set()

    def _take_batch(self) -> list[_Write]:
        """What has no lane comes first: others wait for nothing but the commit itself."""
        batch: list[_Write] = []
        while self._common and len(batch) < _MAX_BATCH:
            batch.append(self._common.popleft())
        lanes, size = 0, 0
        while self._lanes and lanes < _MAX_BATCH and size < _MAX_BATCH_BYTES:
            batch.append(self._lanes.take())
            lanes, size = lanes + 1, size + batch[-1].size
        return batch

    async def _write_batch(self, connection: AsyncConnection, batch: list[_Write]) -> None:
        batch = await self._files_first(batch)
        try:
            await self._transact(connection, batch)
        except Exception:  # noqa: BLE001 - a driver's refusal of a value is no SQLAlchemyError
            # One bad row must not fail the others, nor end the writer: each is tried alone.
            for write in batch:
                try:
                    await self._transact(connection, [write])
                except Exception as error:  # noqa: BLE001 - its caller is told, or the log
                    self._fail(write, error)
        for write in batch:
            if write.done is not None and not write.done.done():
                write.done.set_result(None)
        later = [write.after for write in batch if write.after is not None]
        if later:
            errors = await asyncio.to_thread(_run_each, later)
            for failed in errors.values():  # what was committed stays; files may be left over
                self._log.error("file_work_failed", error=str(failed))

    async def _files_first(self, batch: list[_Write]) -> list[_Write]:
        work = [write.before for write in batch if write.before is not None]
        if not work:
            return batch
        errors = await asyncio.to_thread(_run_each, work)
        kept = []
        for write in batch:
            error = errors.get(write.before) if write.before is not None else None
            if error is None:
                kept.append(write)
            else:
                self._fail(write, error)
        return kept

    async def _transact(self, connection: AsyncConnection, batch: list[_Write]) -> None:
        try:
            index = 0
            while index < len(batch):
                statement, rows = batch[index].statement, list(batch[index].rows)
                for together in batch[index].more:
                    await connection.execute(together)
                index += 1
                if statement is None:
                    continue
                # Neighbours with the same statement become one executemany.
                while rows and index < len(batch) and batch[index].statement is statement:
                    rows.extend(batch[index].rows)
                    index += 1
                if rows:
                    await connection.execute(statement, [dict(row) for row in rows])
                else:
                    await connection.execute(statement)
            await connection.commit()
        except BaseException:
            with suppress(SQLAlchemyError):
                await connection.rollback()
            raise

    def _fail(self, write: _Write, error: Exception) -> None:
        if write.done is not None and not write.done.done():
            write.done.set_exception(error)
        else:
            self._log.error("write_failed", error=str(error), statement=str(write.statement))


def _run_each(work: list[Callable[[], None]]) -> dict[Callable[[], None], Exception]:
    errors: dict[Callable[[], None], Exception] = {}
    for call in work:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - its caller is told, or the log
            errors[call] = error
    return errors


def _upgrade(connection: Connection) -> None:
    upgrade(connection)
