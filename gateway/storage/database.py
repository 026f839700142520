"""The database: SQLite by default, or PostgreSQL, with one writer.

The writer commits all queued writes in one transaction, so a hundred requests share one commit.
Clients' bulk writes wait in a queue per owner. The writer takes from these queues in turn, so a
busy owner does not delay the others. Readers have their own connections and threads.

A failing or full database raises `StorageFailed` or `StorageFull`; the log has the cause. Writes
without a waiting caller stay in memory, in order, until they commit."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Executable,
    Insert,
    RowMapping,
    Select,
    Table,
    TableValuedAlias,
    case,
    func,
    text,
    tuple_,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from gateway.storage.commits import FileWork, Row, Write, errors_of, write_batch
from gateway.storage.drivers import cause_of, make_engine, typed
from gateway.storage.fair_queue import FairQueue
from gateway.storage.leadership import Leadership
from gateway.storage.log_sync import LogSync
from gateway.storage.migrations import upgrade
from tandem.errors import StorageFailed
from tandem.telemetry import get_log

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_READERS = 4
_MAX_BATCH = 512
_MAX_BATCH_BYTES = 32 * 2**20
"""Most file bytes in one transaction, unless a single file is larger."""
_RETRY_AFTER = 1.0
"""Seconds before refused writes are retried."""
_MAX_KEPT = 2**17
"""Most writes in memory while the storage fails. Later ones are dropped and logged."""
_MAX_KEPT_BYTES = 256 * 2**20

_READ_LITTLE = text("SELECT version_num FROM alembic_version")
_CHANGE_NOTHING = text("UPDATE alembic_version SET version_num = version_num")
_ROWS_AT_ONCE = 500
_PAUSE = 4.0
"""The pause after each batch, in durations of the batch."""

Value = TypeVar("Value")
Result = TypeVar("Result")
Record = TypeVar("Record", bound="DataclassInstance")


class Database:
    """Call `await open()` first and `await close()` last, which commits queued writes. An empty URL
    means SQLite in the data directory. `kept_bytes` bounds the memory of writes while the storage
    fails. `leadership` is this gateway's, or None where no leader is elected."""

    def __init__(
        self,
        *,
        url: str,
        data_dir: Path,
        kept_bytes: int = _MAX_KEPT_BYTES,
        leadership: Leadership | None = None,
    ) -> None:
        self._leadership = leadership
        if leadership is not None:
            self._engine = leadership.engine
        else:
            self._engine = make_engine(url or f"sqlite:///{data_dir / 'tandem.db'}")
        self._is_sqlite = self._engine.dialect.name == "sqlite"
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="database-reader")
        self._writer_thread = ThreadPoolExecutor(1, thread_name_prefix="database-writer")
        self._queue: deque[Write] = deque()
        self._owner_queues: FairQueue[Write] = FairQueue()
        self._postponed: list[Write] = []
        self._tried_again: set[Write] = set()
        # Uncommitted writes without a caller:
        self._kept = 0
        self._bytes_kept = 0
        self._most_bytes_kept = kept_bytes
        self._work = asyncio.Event()
        self._closing = False
        self.failure: StorageFailed | None = None
        """The error of the last transaction, None if it was committed."""
        self._unreadable = False
        self._log_sync = LogSync(self._engine)
        self._writer: asyncio.Task[None] | None = None
        self._log = get_log()

    async def open(self) -> None:
        await self._read(upgrade)
        connection = await self._in_writer(self._engine.connect)
        self._writer = asyncio.create_task(self._run_writer(connection), name="database-writer")

    async def close(self) -> None:
        if self._writer is not None:
            self._closing = True
            self._try_again()
            await self._writer
            if self._postponed:
                self._log.error("writes_lost", count=len(self._postponed))
        for threads in (self._writer_thread, self._readers, self._log_sync):
            threads.shutdown()
        if self._leadership is None:  # it resigns with its engine
            self._engine.dispose()

    async def write(
        self,
        statement: Executable,
        *rows: Row,
        before: FileWork | None = None,
        undo: FileWork | None = None,
        owner: str = "",
        size: int = 0,
        durable: bool = False,
    ) -> None:
        """Execute the statement once per row and return after the commit.

        `before` is file work of `size` bytes that runs first, in a thread. Its error is raised
        here. `undo` runs if the write fails. `owner` chooses an owner's queue. A `durable` write
        survives a power failure; others reach the disk with the next durable one. Raises
        `StorageFailed`, `StorageFull`, or the driver's error for an invalid row."""
        write = Write([(statement, rows)], before=before, undo=undo, size=size, durable=durable)
        await self._committed(write, owner)

    async def write_together(
        self, *statements: Executable, durable: bool = False, in_order: bool = False
    ) -> None:
        """Write several statements in one transaction, as `write` does. With `in_order` it fails if
        an earlier write without a caller is postponed meanwhile."""
        rows = [(statement, ()) for statement in statements]
        await self._committed(Write(rows, durable=durable, in_order=in_order))

    async def sync(self) -> None:
        """Return when earlier commits would survive a power failure. Concurrent calls share one
        sync, and the writer goes on. Raises `StorageFailed`."""
        if self._is_sqlite:  # PostgreSQL syncs at every commit
            await self._log_sync.sync()

    def write_soon(
        self,
        statement: Executable,
        *rows: Row,
        before: FileWork | None = None,
        after: FileWork | None = None,
        settled: Callable[[], object] | None = None,
        refused: Callable[[], object] | None = None,
        size: int = 0,
    ) -> None:
        """Write without waiting, and retry while the storage fails. An invalid row is dropped and
        logged. `settled` follows the commit or the drop, `refused` each storage failure before it,
        and the file work `after` a successful commit. Call `has_room` before a large write (`size`
        bytes)."""
        write = Write(
            [(statement, rows)],
            before=before,
            after=after,
            settled=settled,
            refused=refused,
            size=size,
        )
        self._kept += 1
        self._bytes_kept += size
        if self.failure is not None and self._kept > _MAX_KEPT:
            self._drop(write, "too many writes wait for the storage")
        elif self._postponed:
            self._postponed.append(write)
        else:
            self._put(write)

    @property
    def postpones(self) -> bool:
        """Whether writes without a caller wait for a storage that has failed. A write with a caller
        would overtake them."""
        return bool(self._postponed)

    def has_room(self, size: int) -> bool:
        """Return whether a write without a caller may hold this many bytes."""
        return self.failure is None or self._bytes_kept + size <= self._most_bytes_kept

    async def write_in_batches(self, statement: Executable, rows: Select[Any]) -> int:
        """Execute the statement for each row of a query with its parameters as columns. Pause
        between batches for other writers. Return the number of rows. The query must not return a
        processed row again."""
        count = 0
        while found := await self.read(rows.limit(_ROWS_AT_ONCE)):
            started = time.monotonic()
            await self.write(statement, *cast(Sequence[Row], found))
            count += len(found)
            await asyncio.sleep(_PAUSE * (time.monotonic() - started))
        return count

    async def check(self) -> None:
        """Repeat a failed last read or write, and raise its error if it fails again."""
        if self.failure is not None:
            await self.write(_CHANGE_NOTHING)
        if self._unreadable:
            await self.read(_READ_LITTLE)

    async def flush(self) -> bool:
        """Wait for all queued writes outside the owners' queues. Return False if some were refused
        and will be retried."""
        await self._committed(Write([]))
        return not self._postponed and not self._tried_again

    async def read(self, statement: Executable) -> Sequence[RowMapping]:
        return await self._read(lambda connection: connection.execute(statement).mappings().all())

    async def read_one(self, statement: Executable) -> RowMapping | None:
        rows = await self.read(statement)
        return rows[0] if rows else None

    async def read_value(self, statement: Select[Value]) -> Value:
        return await self._read(lambda connection: connection.execute(statement).scalar_one())

    async def read_in_batches(
        self, query: Select[Any], *key: Column[Any], descending: bool = False
    ) -> AsyncIterator[Sequence[RowMapping]]:
        """Yield a query's rows in batches, ordered by the unique columns `key`. Rows may come and
        go."""
        order = [column.desc() if descending else column for column in key]
        query = query.order_by(*order).limit(_ROWS_AT_ONCE)
        rows = await self.read(query)
        while rows:
            yield rows
            last = tuple(rows[-1][column.name] for column in key)
            after = tuple_(*key) < last if descending else tuple_(*key) > last
            rows = await self.read(query.where(after)) if len(rows) == _ROWS_AT_ONCE else []

    def elements_of(self, texts: ColumnElement[Any]) -> TableValuedAlias:
        """Return the elements of each row's JSON list of texts, as the column `value`."""
        each = func.json_each if self._is_sqlite else func.json_array_elements_text
        return each(texts).table_valued("value", joins_implicitly=True)

    def insert_or_add(
        self, table: Table, *, counters: Sequence[str], peaks: Sequence[str] = ()
    ) -> Executable:
        """Return a statement that inserts a row, or adds its counters to the existing row and keeps
        the larger peaks."""
        insert = self._insert(table)

        def larger(name: str) -> ColumnElement[Any]:
            old, new = table.c[name], insert.excluded[name]
            return case((old.is_(None) | (new > old), new), else_=old)

        return insert.on_conflict_do_update(
            index_elements=list(table.primary_key),
            set_={name: table.c[name] + insert.excluded[name] for name in counters}
            | {name: larger(name) for name in peaks},
        )

    def insert_or_replace(self, table: Table) -> Executable:
        """Return a statement that inserts a row, or replaces the row with its primary key."""
        insert = self._insert(table)
        others = (column.name for column in table.columns if not column.primary_key)
        return insert.on_conflict_do_update(
            index_elements=list(table.primary_key),
            set_={name: insert.excluded[name] for name in others},
        )

    def insert_once(self, table: Table) -> Insert:
        return self._insert(table).on_conflict_do_nothing()

    def _insert(self, table: Table) -> sqlite.Insert | postgresql.Insert:
        return sqlite.insert(table) if self._is_sqlite else postgresql.insert(table)

    async def _read(self, query: Callable[[Connection], Result]) -> Result:
        def with_connection() -> Result:
            try:
                with self._engine.connect() as connection:
                    return query(connection)
            except DBAPIError as error:
                raise typed(error) from error

        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._readers, with_connection)
        except StorageFailed as failure:
            if not self._unreadable:
                self._log.error("reads_fail", type=failure.type, reason=cause_of(failure))
            self._unreadable = True
            raise
        if self._unreadable:
            self._log.warning("reads_work_again")
        self._unreadable = False
        return result

    async def _committed(self, write: Write, owner: str = "") -> None:
        write.done = asyncio.get_running_loop().create_future()
        self._put(write, owner)
        await write.done

    def _put(self, write: Write, owner: str = "") -> None:
        if owner:
            self._owner_queues.put(owner, write)
        else:
            self._queue.append(write)
        self._work.set()

    async def _run_writer(self, connection: Connection) -> None:
        epoch = self._leadership.epoch if self._leadership is not None else 0
        while True:
            await self._work.wait()
            self._work.clear()
            while batch := self._take_batch():
                errors = await self._in_writer(partial(write_batch, connection, batch, epoch))
                self._note_failure(batch, errors)
                done = [write for write, error in zip(batch, errors, strict=True) if error is None]
                self._settle(batch, errors)
                if later := [write.after for write in done if write.after is not None]:
                    for error in await self._in_writer(partial(errors_of, later)):
                        if error is not None:  # the commit stays, though files may be left over
                            self._log.error("file_work_failed", error=str(error))
            if self._closing:
                await self._in_writer(connection.close)
                return

    def _in_writer(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(self._writer_thread, work)

    def _take_batch(self) -> list[Write]:
        """Take writes without an owner first, because they wait for the commit only."""
        batch: list[Write] = []
        while self._queue and len(batch) < _MAX_BATCH:
            batch.append(self._queue.popleft())
        taken, size = 0, 0
        while self._owner_queues and taken < _MAX_BATCH and size < _MAX_BATCH_BYTES:
            batch.append(self._owner_queues.take())
            taken, size = taken + 1, size + batch[-1].size
        return batch

    def _note_failure(self, batch: Sequence[Write], errors: Sequence[Exception | None]) -> None:
        failure = next((error for error in errors if isinstance(error, StorageFailed)), None)
        if failure is not None and self.failure is None:
            self._log.error("storage_failed", type=failure.type, reason=cause_of(failure))
        elif failure is None and not any(write.statements for write in batch):
            return
        elif failure is None and self.failure is not None:
            self._log.warning("storage_works_again")
        self.failure = failure

    def _settle(self, batch: Sequence[Write], errors: Sequence[Exception | None]) -> None:
        """Report each outcome to its caller or the log. Postpone refused writes without a
        caller."""
        refused = []
        for write, error in zip(batch, errors, strict=True):
            if write.done is not None:
                if error is not None and not write.done.done():
                    write.done.set_exception(error)
                elif not write.done.done():
                    write.done.set_result(None)
            elif isinstance(error, StorageFailed):
                refused.append(write)
                if write.refused is not None:
                    write.refused()
            elif error is not None:
                self._drop(write, str(error))
            else:
                self._forget(write)
        if refused:
            self._postpone(refused)

    def _postpone(self, refused: Sequence[Write]) -> None:
        """Postpone writes without a caller, and the queued ones too, to keep their order. Queued
        writes with a caller go on, but those `in_order` fail."""
        queued, self._queue = self._queue, deque()
        self._postponed = [*refused]
        for write in queued:
            if write.done is None:
                self._postponed.append(write)
            elif not write.in_order:
                self._queue.append(write)
            elif not write.done.done():
                write.done.set_exception(StorageFailed("earlier writes wait for the storage"))
        asyncio.get_running_loop().call_later(_RETRY_AFTER, self._try_again)

    def _try_again(self) -> None:
        postponed, self._postponed = self._postponed, []
        self._tried_again.update(postponed)
        self._queue.extendleft(reversed(postponed))
        self._work.set()

    def _forget(self, write: Write) -> None:
        self._tried_again.discard(write)
        self._kept -= 1
        self._bytes_kept -= write.size
        if write.settled is not None:
            write.settled()

    def _drop(self, write: Write, reason: str) -> None:
        self._forget(write)
        statements = [str(statement) for statement, _ in write.statements]
        self._log.error("write_failed", error=reason, statements=statements)


def from_row(type_: type[Record], row: RowMapping | Row, **changes: object) -> Record:
    """Build a dataclass from the columns with its fields' names and from `changes`."""
    make: Callable[..., Record] = type_
    values = {field.name: row[field.name] for field in fields(type_) if field.name in row}
    return make(**values | changes)
