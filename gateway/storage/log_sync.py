"""Syncs SQLite's write-ahead log to the disk, in parallel with the writer."""

from __future__ import annotations

import asyncio
import errno
import os
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import Engine

from gateway.storage.drivers import typed
from tandem.errors import describe
from tandem.telemetry import get_log


class LogSync:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="database-sync")
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        self._in_doubt = False
        self._fd = -1

    async def sync(self) -> None:
        """Return when all earlier commits are on the disk. Raises `StorageFailed`."""
        if self._next is None:
            self._next = asyncio.create_task(self._sync(), name="database-sync")
        await asyncio.shield(self._next)  # because other callers wait for it, too

    def shutdown(self) -> None:
        self._thread.shutdown()
        if self._fd >= 0:
            os.close(self._fd)

    async def _sync(self) -> None:
        async with self._one_at_a_time:
            self._next = None  # later callers may have later commits
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._thread, self._sync_file)
            except Exception as error:
                self._in_doubt = True
                get_log().error("sync_failed", reason=describe(error))
                raise typed(error) from error
            self._in_doubt = False

    def _sync_file(self) -> None:
        """Sync the log file. After a failed sync, first write the log into the database: the kernel
        may have dropped pages and still report success at the next sync."""
        if self._in_doubt:
            with self._engine.connect() as connection:
                busy, *_ = connection.exec_driver_sql("PRAGMA wal_checkpoint(FULL)").one()
                if busy:
                    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        if self._fd < 0:  # the file stays the same while a connection is open
            self._fd = os.open(f"{self._engine.url.database}-wal", os.O_RDONLY)
        os.fsync(self._fd)
