"""Writes and reads the metrics and rollouts of runs.

The files hold them. The tables `run_records` and `rollout_batches` are their index, written after
the files and before the answer. Files are read and written in threads of this module, so a slow
disk delays nothing else."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from sqlalchemy import func, select

from gateway.checkpoints.catalog import CheckpointCatalog
from gateway.identifiers import unknown_run
from gateway.metrics import Metrics
from gateway.runs.record.curves import MOST_POINTS, Curve, CurveCache, joined, thinned
from gateway.runs.record.files import Kind, Place, SegmentWriter, end_of, record_folder
from gateway.runs.record.identity_files import IdentityFiles
from gateway.runs.record.lineage import Ancestor
from gateway.runs.record.metrics import (
    MetricsRow,
    RowLines,
    Source,
    lines_of_rows,
    read_rows,
)
from gateway.runs.record.progress import RecordIndex
from gateway.runs.record.rollouts import (
    BATCH_BYTES,
    Order,
    Rollout,
    RolloutBatch,
    RolloutPage,
    RolloutStep,
    batch_of,
    lines_of_rollouts,
    read_page,
)
from gateway.storage.database import Database, from_row
from gateway.storage.drivers import typed
from gateway.storage.tables import rollout_batches, run_records, runs
from tandem.errors import LimitExceeded, StorageFailed, describe
from tandem.telemetry import get_log
from tandem.tracking.names import SERVER

MAX_RECORD = 2 * 2**30
"""Bytes of a run's record."""
_PENDING = 1000
"""Server rows of a run that wait for a failing disk."""
_RETRY = 5.0
_CLOSE = 10.0
_WRITE, _READ = 20.0, 60.0
"""Seconds to wait for a disk."""
_SLOW_DISK = f"the gateway's disk took more than {_WRITE:.0f} s for the record; try again"
_NARROW = (
    f"reading the record took more than {_READ:.0f} s; narrow the step: log fewer rollouts in it, "
    "or read it in the given order without a search"
)
_IDLE = 3600.0
"""Seconds until a run without new rows leaves the memory."""
_STEPS = 1000
_THREADS, _READERS = 4, 2
"""A long record is read for seconds, beside which rows are written."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Appended:
    """The numbers of written and dropped rows or rollouts. `why` is a sentence about the last
    dropped one."""

    written: int
    dropped: int
    why: str = ""


class _Writing:
    """A run's record while this gateway writes it. The lock keeps the order of the files."""

    def __init__(self, folder: Path, epoch: int, owner: str, index: RecordIndex) -> None:
        self.owner = owner
        self.index = index
        self.metrics = SegmentWriter(folder, "metrics", epoch)
        self.rollouts = SegmentWriter(folder, "rollouts", epoch)
        self.lock = asyncio.Lock()
        self.unsure = False
        """Rollouts may be in the file without a row. Their batch may be written again."""
        self.used_at = time.monotonic()


@dataclass(eq=False, kw_only=True)
class RecordStore:
    """`epoch` is the gateway's. Errors of the disk are `StorageFailed` and `StorageFull`: nothing
    was acknowledged, and the client sends again."""

    database: Database
    data_dir: Path
    checkpoints: CheckpointCatalog
    metrics: Metrics
    epoch: int
    most_bytes: int = MAX_RECORD
    retry: float = _RETRY

    def __post_init__(self) -> None:
        self.cache = CurveCache(self.data_dir)
        self.identity_files = IdentityFiles(self.database, self.data_dir)
        self._put_index = self.database.insert_or_replace(run_records)
        self._put_batch = self.database.insert_or_replace(rollout_batches)
        self._runs: dict[str, _Writing] = {}
        self._pending: dict[str, list[MetricsRow]] = {}
        self._flushing: dict[str, asyncio.Task[None]] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="record")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="record-reader")
        self._log = get_log()

    async def close(self) -> None:
        """Write the waiting rows of the server, once."""
        for task in (tasks := list(self._flushing.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE):
                await asyncio.gather(
                    self.identity_files.close(),
                    *map(self._write_pending, list(self._pending)),
                    return_exceptions=True,
                )
        if self._pending:
            self._log.error("server_rows_lost", runs=len(self._pending))
        for threads in (self._threads, self._readers):
            threads.shutdown(wait=False, cancel_futures=True)

    # --- Writing ------------------------------------------------------------------------------

    async def append_metrics(
        self, run_id: str, rows: Sequence[MetricsRow], source: Source
    ) -> Appended:
        """Write rows of metrics. Drops and counts rows beyond a limit. Raises `UnknownRun`."""
        async with self._writing(run_id) as writing:
            now, by_user, known = time.time(), source == "user", writing.index.last
            found = RowLines(why=await self._why_full(writing) if by_user and rows else "")
            if not found.why:
                found = await self._in_thread(lambda: lines_of_rows(rows, source, known, now))
            if found.lines:
                await self._in_thread(lambda: writing.metrics.append(b"".join(found.lines)))
            index = replace(writing.index, updated_at=now)
            index = index.with_rows(found.rows, found.last, by_user=by_user)
            told = Appended(len(found.lines), len(rows) - len(found.lines), found.why)
            await self._keep("metrics", writing, index, told, sum(map(len, found.lines)))
            self.metrics.note_dropped(known, found.last)
            return told

    async def append_rollouts(
        self, run_id: str, batch: str, step: int, rollouts: Sequence[Rollout]
    ) -> Appended:
        """Write the rollouts of a batch once: a repeated `batch` changes nothing. Drops and counts
        rollouts beyond a limit. A batch without a written one may come again. Raises
        `UnknownRun`."""
        async with self._writing(run_id) as writing:
            this = (rollout_batches.c.run_id == run_id) & (rollout_batches.c.batch == batch)
            if known := await self.database.read_one(select(rollout_batches).where(this)):
                return Appended(known["count"], max(len(rollouts) - known["count"], 0))
            now, lines = time.time(), list[tuple[bytes, float | None]]()
            if not (why := await self._why_full(writing)):
                lines = await self._in_thread(
                    lambda: lines_of_rollouts(rollouts, step=step, batch=batch, at=now)
                )
                if len(lines) < len(rollouts):
                    why = "a rollout has more than 1 MiB, 250 levels or 64 bits of an integer"
            size, rated = 0, False
            if lines:  # else the batch may be sent again when the record has room
                anew, writing.unsure = writing.unsure, True
                content = b"".join(line for line, _ in lines)
                place = await self._in_thread(lambda: writing.rollouts.append(content, anew))
                sizes = [(len(line), reward) for line, reward in lines]
                row = batch_of(run_id, batch, step, place, sizes)
                await self.database.write(self._put_batch, asdict(row))
                writing.unsure = False
                size, rated = BATCH_BYTES + row.bytes, row.rated > 0
            count = writing.index.rollouts + len(lines)
            index = replace(writing.index, updated_at=now, rollouts=count)
            told = Appended(len(lines), len(rollouts) - len(lines), why)
            await self._keep("rollouts", writing, index, told, size)
        if rated and "reward" not in index.last:
            for one in await self._rollout_steps(run_id, step):
                self.note_step(run_id, step, {"reward": one.reward_mean})
        return told

    def note_step(
        self, run_id: str, step: int, values: Mapping[str, float | None], at: float | None = None
    ) -> None:
        """Write the server's own values of a step soon, without waiting. Their names get the prefix
        `tandem/`. A later call for the same step replaces values of equal names."""
        known = {SERVER + name: value for name, value in values.items() if value is not None}
        waiting = self._pending.setdefault(run_id, [])
        waiting.append(MetricsRow(step, known, at if at is not None else time.time()))
        del waiting[:-_PENDING]
        if run_id not in self._flushing:
            task = asyncio.create_task(self._flush(run_id), name=f"record-{run_id}")
            self._flushing[run_id] = task

    async def _flush(self, run_id: str) -> None:
        try:
            while self._pending.get(run_id):
                try:
                    await self._write_pending(run_id)
                except StorageFailed as error:
                    self._log.error("record_not_written", run_id=run_id, reason=error.message)
                    await asyncio.sleep(self.retry)
        finally:  # at once, so that the next `note_step` begins a new task
            self._flushing.pop(run_id, None)

    async def _write_pending(self, run_id: str) -> None:
        rows = self._pending.pop(run_id, [])
        try:
            await self.append_metrics(run_id, rows, "tandem")
        except (StorageFailed, asyncio.CancelledError):
            self._pending[run_id] = [*rows, *self._pending.get(run_id, [])][-_PENDING:]
            raise
        except Exception:  # noqa: BLE001 - these rows would fail again
            self._log.exception("server_rows_not_written", run_id=run_id)

    @asynccontextmanager
    async def _writing(self, run_id: str) -> AsyncIterator[_Writing]:
        """Hold a run's record for the block. Raises `UnknownRun`, and `StorageFailed` if a slow
        disk keeps it."""
        if (writing := self._runs.get(run_id)) is None:
            row = await self.database.read_one(
                select(runs.c.owner, run_records)
                .outerjoin(run_records, run_records.c.run_id == runs.c.id)
                .where(runs.c.id == run_id)
            )
            if row is None:
                raise unknown_run(run_id)
            index = from_row(RecordIndex, row) if row["run_id"] else RecordIndex(run_id)
            folder = record_folder(self.data_dir, run_id)
            self._forget_idle()
            new = _Writing(folder, self.epoch, row["owner"], index)
            writing = self._runs.setdefault(run_id, new)  # another call may have been first
        writing.used_at = time.monotonic()
        async with _in_time(_WRITE, slow=_SLOW_DISK):
            await writing.lock.acquire()
        try:
            yield writing
        finally:
            writing.lock.release()

    def _forget_idle(self) -> None:
        before = time.monotonic() - _IDLE
        for run_id in [key for key, writing in self._runs.items() if writing.used_at < before]:
            del self._runs[run_id]

    async def _keep(
        self, kind: Kind, writing: _Writing, index: RecordIndex, told: Appended, size: int
    ) -> None:
        """Write the index after `size` new bytes, and count the rows or rollouts."""
        dropped = index.dropped + told.dropped
        index = replace(index, bytes=index.bytes + size, dropped=dropped)
        await self.database.write(self._put_index, asdict(index))
        writing.index = index
        self.metrics.record_rows.labels(kind).inc(told.written)
        self.metrics.record_dropped.labels(kind).inc(told.dropped)

    async def _why_full(self, writing: _Writing) -> str:
        """Return why a run may write no more, or ""."""
        if writing.index.bytes >= self.most_bytes:
            return f"the record of this run has {self.most_bytes} bytes, which is the limit"
        try:
            await self.checkpoints.check_quota(owner=writing.owner, expected_bytes=0)
        except LimitExceeded as error:
            return error.message
        return ""

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        """Raises `StorageFailed` for an `OSError`, and after 20 s."""
        async with _in_time(_WRITE, slow=_SLOW_DISK):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # --- Reading ------------------------------------------------------------------------------

    async def owner_of(self, run_id: str) -> str:
        """Return a run's owner. Raises `UnknownRun`."""
        row = await self.database.read_one(select(runs.c.owner).where(runs.c.id == run_id))
        if row is None:
            raise unknown_run(run_id)
        return str(row["owner"])

    async def summaries(self, run_ids: Sequence[str]) -> dict[str, RecordIndex]:
        """Return the indexes of these runs, also of runs without a record."""
        found = await self.database.read(
            select(run_records).where(run_records.c.run_id.in_(run_ids))
        )
        known = {row["run_id"]: from_row(RecordIndex, row) for row in found}
        return {run_id: known.get(run_id) or RecordIndex(run_id) for run_id in run_ids}

    async def curves(
        self,
        run_id: str,
        names: Collection[str] | None,
        points: int,
        ancestors: Sequence[Ancestor] = (),
    ) -> dict[str, Curve]:
        """Return curves of at most `points` points, by name. None: all names. The curves of
        `ancestors` (`ancestors_of`) come first, until the run continues them. Each part has about
        twice as many points before they are joined."""

        parts: list[Ancestor] = [*ancestors, (run_id, None)]
        in_all = 2 * MOST_POINTS // len(parts)

        def read() -> dict[str, Curve]:
            if not ancestors:
                return thinned(self.cache.curves(run_id, names), points)
            curves = ((self.cache.curves(one, names), step) for one, step in parts)
            each = ((thinned(found, 2 * points, in_all=in_all), step) for found, step in curves)
            return thinned(joined(each), points)

        return await self._read(read)

    async def rows_after(
        self, run_id: str, after: Place, *, only_server: bool = False
    ) -> tuple[list[MetricsRow], Place]:
        """Return the rows behind a place, as `read_rows` does."""
        folder = record_folder(self.data_dir, run_id)
        return await self._read(lambda: read_rows(folder, after, only_server=only_server))

    async def end_of_metrics(self, run_id: str) -> Place:
        """Return the place behind the rows until now."""
        return await self._read(lambda: end_of(record_folder(self.data_dir, run_id), "metrics"))

    async def rollouts(
        self,
        run_id: str,
        step: int | None,
        order: Order = "given",
        search: str = "",
        limit: int = 50,
        offset: int = 0,
        before: int | None = None,
    ) -> RolloutPage:
        """Return a page of a step's rollouts, of the newest step (before `before`) by default. An
        owner's runs are scanned for an order or a text one after another. Raises `UnknownRun`, and
        `StorageFailed` after a minute."""
        turn = self._turns.setdefault(await self.owner_of(run_id), asyncio.Lock())
        steps = await self._rollout_steps(run_id, before=before)
        if step is None:
            step = steps[-1].step if steps else None
        this = (rollout_batches.c.run_id == run_id) & (rollout_batches.c.step == step)
        found = await self.database.read(select(rollout_batches).where(this))
        batches = sorted((from_row(RolloutBatch, row) for row in found), key=lambda one: one.place)
        stop = threading.Event()  # a cancelled call ends its thread too

        def read() -> tuple[list[Rollout], int]:
            return read_page(
                record_folder(self.data_dir, run_id),
                batches,
                order=order,
                search=search,
                limit=limit,
                offset=offset,
                stopped=stop.is_set,
            )

        try:
            page, count = await self._read(read, turn if search or order != "given" else None)
        finally:
            stop.set()
        return RolloutPage(steps=steps, step=step, rollouts=page, total_count=count)

    async def _rollout_steps(
        self, run_id: str, step: int | None = None, *, before: int | None = None
    ) -> list[RolloutStep]:
        """Return the newest steps with rollouts in order, those before a step, or one step."""
        table = rollout_batches.c
        wanted = table.run_id == run_id
        if step is not None:
            wanted &= table.step == step
        if before is not None:
            wanted &= table.step < before
        rows = await self.database.read(
            select(
                table.step,
                func.sum(table.count).label("count"),
                func.min(table.reward_min).label("reward_min"),
                (
                    func.sum(table.reward_mean * table.rated)
                    / func.nullif(func.sum(table.rated), 0)
                ).label("reward_mean"),
                func.max(table.reward_max).label("reward_max"),
            )
            .where(wanted)
            .group_by(table.step)
            .order_by(table.step.desc())
            .limit(_STEPS)
        )
        return [from_row(RolloutStep, row, count=int(row["count"])) for row in reversed(rows)]

    async def _read(self, work: Callable[[], Result], turn: asyncio.Lock | None = None) -> Result:
        """Hold `turn` meanwhile. Raises `StorageFailed` for an `OSError`, and after a minute."""
        async with _in_time(_READ, slow=_NARROW), turn or nullcontext():
            return await asyncio.get_running_loop().run_in_executor(self._readers, work)


@asynccontextmanager
async def _in_time(seconds: float, *, slow: str) -> AsyncIterator[None]:
    """Raises `StorageFailed` for an `OSError`, and with the sentence `slow` after these seconds."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except OSError as error:  # also `TimeoutError`
        get_log().error("record_failed", reason=describe(error))
        failure = StorageFailed(slow) if isinstance(error, TimeoutError) else typed(error)
        raise failure from error
