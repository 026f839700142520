"""Leadership: one gateway uses a PostgreSQL database, the leader. SQLite needs no leader, because
the data directory has a lock.

One row holds an epoch, which each leader raises, and a beat, which the leader counts up. The epoch
is at least the time in milliseconds, so agents recognize the newest gateway even after a restored
backup. A gateway becomes the leader when the last one resigned, when that one is an ended process
of this machine, or when the beat stood still for `timeout` seconds of its own clock. A superseded
leader cannot write, because each transaction checks the epoch. It ends itself at its next beat."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import psutil
from sqlalchemy import Connection, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError

from gateway.storage.drivers import make_engine, typed
from gateway.storage.migrations import newest_revision, revision_of
from gateway.storage.tables import leader, metadata
from tandem.errors import StorageFailed
from tandem.telemetry import get_log

_POLL = 0.05
"""Seconds between two looks at another gateway's row. They are a part of each takeover."""
_BEATS = 5
"""Beats per `timeout`."""

_ONE_AT_A_TIME = text("SELECT pg_advisory_xact_lock(hashtext('gateway_lease'))")
"""Serializes the table's creation, because PostgreSQL refuses a concurrent one."""

Result = TypeVar("Result")


class Leadership:
    """One gateway's right to write the database. `take` sets its `epoch`. `holder` names another
    leader."""

    @classmethod
    @asynccontextmanager
    async def open(cls, *, url: str, timeout: float) -> AsyncIterator[Leadership]:
        """Connect, and resign at the end of the block."""
        leadership = cls(url=url, timeout=timeout)
        try:
            yield leadership
        finally:
            await leadership._close()

    def __init__(self, *, url: str, timeout: float) -> None:
        self.epoch = 0
        self.holder = ""
        self._timeout = timeout
        self._name = _this_process()
        self.engine = make_engine(url)
        """The leader uses its connections for everything."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leader")
        self._seen: tuple[int, int] | None = None
        self._seen_at = 0.0
        self._log = get_log()

    async def take(self) -> bool:
        """Become the leader if there is none. Raises `StorageFailed`."""
        taken = await self._in_thread(self._take)
        if taken:
            self._log.info("leadership_taken", epoch=self.epoch)
        return taken

    async def wait(self) -> None:
        """Wait for leadership. The leader's time does not run while the database is away."""
        warm = False
        while True:
            try:
                if await self.take():
                    return
                if not warm:
                    await self._in_thread(self._warm_up)
                    warm = True
            except StorageFailed:
                self._seen = None
            await asyncio.sleep(_POLL)

    async def take_unless_used(self) -> bool:
        """Become the leader even after a dead one, after `timeout` seconds of watching. Return
        False as soon as the leader beats. Raises `StorageFailed`."""
        taken = await self.take()
        seen = self._seen
        while not taken and self._seen == seen:
            await asyncio.sleep(_POLL)
            taken = await self.take()
        return taken

    async def lost(self) -> None:
        """Beat until another gateway is the leader. An unreachable database is an outage, not a
        loss."""
        while True:
            await asyncio.sleep(self._timeout / _BEATS)
            try:
                if not await self._in_thread(self._beat):
                    self._log.error("leadership_lost", epoch=self.epoch)
                    return
            except StorageFailed:
                pass  # the writer logs it

    async def _close(self) -> None:
        if self.epoch:
            try:
                await self._in_thread(self._resign)
            except StorageFailed as error:  # it expires
                self._log.warning("not_resigned", reason=error.message)
        self._thread.shutdown()
        self.engine.dispose()

    async def _in_thread(self, work: Callable[[Connection], Result]) -> Result:
        def in_transaction() -> Result:
            try:
                with self.engine.begin() as connection:
                    return work(connection)
            except DBAPIError as error:
                raise typed(error) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, in_transaction)

    def _take(self, connection: Connection) -> bool:
        if self._seen is None:  # not a migration, because only the leader may migrate
            connection.execute(_ONE_AT_A_TIME)
            leader.create(connection, checkfirst=True)
            connection.execute(insert(leader).on_conflict_do_nothing(), {})
        row, table = connection.execute(select(leader)).one(), leader.c
        if self._seen != (row.epoch, row.beat):
            self._seen, self._seen_at = (row.epoch, row.beat), time.monotonic()
        overdue = time.monotonic() - self._seen_at >= self._timeout
        self.holder = row.holder
        if row.holder and not overdue and not _has_ended(row.holder):
            return False
        same = (table.epoch == row.epoch) & (table.beat == row.beat) & (table.holder == row.holder)
        change = update(leader).where(same)
        epoch = max(row.epoch + 1, int(time.time() * 1000))
        values = {"epoch": epoch, "beat": 0, "holder": self._name}
        if connection.execute(change.values(values)).rowcount != 1:  # another gateway was faster
            return False
        self.epoch = epoch
        return True

    def _warm_up(self, first: Connection) -> None:
        """Let the next gateway's connections read the tables, so that clients do not wait for it.
        A new connection of PostgreSQL first reads its catalog, which takes 1 ms for each table."""
        with self.engine.connect() as second:
            for connection in (first, second):
                if revision_of(connection) == newest_revision():  # with all tables
                    for table in metadata.sorted_tables:
                        connection.execute(select(table).limit(0))

    def _beat(self, connection: Connection) -> bool:
        mine, beat = leader.c.epoch == self.epoch, leader.c.beat
        change = update(leader).where(mine).values(beat=beat + 1)
        return connection.execute(change).rowcount == 1

    def _resign(self, connection: Connection) -> None:
        mine = leader.c.epoch == self.epoch
        connection.execute(update(leader).where(mine).values(holder=""))


def _this_process() -> str:
    return f"{_machine()} {os.getpid()} {psutil.Process().create_time()}"


def _machine() -> str:
    """Return a name shared by processes that see each other's process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{os.uname().nodename} {boot} {Path('/proc/self/ns/pid').readlink()}"


def _has_ended(holder: str) -> bool:
    """Return whether the leader is a missing or zombie process of this machine."""
    machine, pid, created = holder.rsplit(" ", 2)
    if machine != _machine():
        return False
    try:
        process = psutil.Process(int(pid))
        same = str(process.create_time()) == created
        return not same or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
