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
        self._waiting: list[asyncio.Future[None]] = []
        self._syncing: asyncio.Task[None] | None = None
        self._in_doubt = False
        self._fd = -1

    async def sync(self) -> None:
        """Return when all earlier commits are on the disk. Raises `StorageFailed`."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        if self._syncing is None or self._syncing.done():
            self._syncing = asyncio.create_task(self._sync_all(), name="database-sync")
        await done

    def shutdown(self) -> None:
        self._thread.shutdown()
        if self._fd >= 0:
            os.close(self._fd)

    async def _sync_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting, []
            failed: Exception | None = None
            try:
                await loop.run_in_executor(self._thread, self._sync_file)
            except Exception as error:  # noqa: BLE001 - its callers would wait for ever
                failed = typed(error)
                get_log().error("sync_failed", reason=describe(error))
            self._in_doubt = failed is not None
            for done in batch:
                if done.done():  # its caller is gone
                    continue
                if failed is not None:
                    done.set_exception(failed)
                else:
                    done.set_result(None)

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
