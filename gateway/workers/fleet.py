"""The workers of this gateway, with their secrets, channels and database rows."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import grpc.aio
from sqlalchemy import insert, select, update

from gateway.metrics import Metrics
from gateway.storage.database import Database
from gateway.storage.tables import workers
from gateway.workers.epoch import Epoch
from gateway.workers.heartbeats import Heartbeats, heartbeat_seconds
from gateway.workers.launchers.base import Launcher
from gateway.workers.worker import Worker, WorkerRecord
from tandem.errors import (
    GatewaySuperseded,
    TandemError,
    WorkerCrashed,
    WorkerDied,
    WorkerMayRun,
    WorkerStartFailed,
    describe,
)
from tandem.protocol.worker import (
    WORKER_STOP_TIMEOUT,
    WorkerExit,
    WorkerHandle,
    WorkerKind,
    WorkerSpec,
    own_version,
)
from tandem.settings.gateway import GatewaySettings
from tandem.telemetry import get_log

_ASK_AGAIN = 5.0
"""Seconds until a launcher that could not say that a worker is gone is asked again."""


@dataclass(eq=False, kw_only=True)
class Fleet:
    """Starts and stops workers by a launcher, and keeps a record and a row of each.

    Whatever returns when nothing of a worker is left returns only when that is known: the launcher
    is asked again and again, also when nobody waits for the answer any more. A gateway that stops
    meanwhile leaves the worker to the next one, which finds it (`open`)."""

    settings: GatewaySettings
    database: Database
    launcher: Launcher
    metrics: Metrics
    epoch: Epoch

    def __post_init__(self) -> None:
        self._records: dict[str, WorkerRecord] = {}
        self._next_number: defaultdict[str, int] = defaultdict(int)
        self._watchers: list[asyncio.Task[None]] = []
        self._given_up: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[tuple[str, bool], asyncio.Task[None]] = {}
        self._left: dict[str, WorkerHandle] = {}
        self._left_engines: list[WorkerHandle] = []
        self._starting: dict[str, str] = {}
        """By the key of its place, the worker that starts there."""
        self._heartbeats = Heartbeats(
            settings=self.settings, records=self._records, give_up=self.give_up
        )
        self._log = get_log()

    async def open(self) -> None:
        """Find the workers that an earlier gateway has left: trainers, which `adopt` takes over,
        and engines, which `take_engines` returns. Mark the rows of the others as ended, and watch
        for exits. Each trainer has heard of this gateway then, or stands still."""
        found = await self.launcher.list()
        self._left = {each.run_id: each for each in found if each.kind == "trainer"}
        self._left_engines = [each for each in found if each.kind == "sampler"]
        left = [each.worker_id for each in (*self._left.values(), *self._left_engines)]
        others = [each.worker_id for each in found if each.worker_id not in left]
        await asyncio.gather(*(self.launcher.stop(each, at_once=True) for each in others))
        await self.database.write(
            update(workers)
            .where(workers.c.state != "ended", workers.c.id.not_in(left))
            .values(state="ended", reason="the gateway restarted", ended_at=time.time())
        )
        for row in await self.database.read(select(workers.c.id)):
            prefix, _, number = row["id"].rpartition("-")
            if number.isdecimal():
                self._next_number[prefix] = max(self._next_number[prefix], int(number) + 1)
        await asyncio.gather(*(self._claim(each) for each in self._left.values()))
        watch = self._note_exits(self.launcher.watch())
        self._watchers = [
            asyncio.create_task(watch, name="worker-watcher"),
            asyncio.create_task(self._heartbeats.ask_all(), name="worker-heartbeats"),
        ]

    async def _claim(self, handle: WorkerHandle) -> None:
        """Let a worker hear of this gateway's epoch, so that it hears no earlier one any more."""
        with suppress(grpc.aio.AioRpcError, GatewaySuperseded):
            async with self.reach(handle) as worker:
                await worker.check_health(timeout=2 * heartbeat_seconds(self.settings))

    async def stop_left(self, *, except_of: Container[str] = ()) -> None:
        """Stop the trainers that an earlier gateway has left, except those of some runs."""
        for run_id in [each for each in self._left if each not in except_of]:
            await self.stop_left_of(run_id)

    async def stop_left_of(self, run_id: str) -> None:
        """Stop the trainer of a run that was not adopted, if there is one."""
        if (handle := self._left.get(run_id)) is not None:
            await self.stop_left_worker(handle, "its run has ended")
            self._left.pop(run_id, None)  # not before: whoever cancels this stops what is left

    def has_left(self, run_id: str) -> bool:
        """Whether there is a trainer of a run that was not adopted yet."""
        return run_id in self._left

    @asynccontextmanager
    async def left_trainer(self, run_id: str) -> AsyncIterator[Worker]:
        """Reach the trainer of a run that was not adopted yet. Raises `WorkerDied` if there is
        none."""
        if (handle := self._left.get(run_id)) is None:
            raise WorkerDied("the trainer of an earlier gateway has ended")
        async with self.reach(handle) as worker:
            yield worker

    @asynccontextmanager
    async def reach(self, handle: WorkerHandle) -> AsyncIterator[Worker]:
        """Reach a worker that was not adopted yet."""
        worker = Worker.of(handle, self.epoch)
        try:
            yield worker
        finally:
            await worker.channel.close()

    async def adopt(self, run_id: str, *, on_exit: Callable[[str], None]) -> Worker | None:
        """Take over the trainer of a run that an earlier gateway has left; None if there is none,
        or none that serves."""
        handle = self._left.get(run_id)
        if handle is None:
            return None
        try:
            await self.launcher.wait_ready(handle.worker_id)
        except TandemError as error:
            await self.stop_left_worker(handle, error.message)
            self._left.pop(run_id, None)
            return None
        if self._left.pop(run_id, None) is None:  # it was stopped meanwhile
            return None
        return self._note_adopted(self._add_record(handle, on_exit), Worker.of(handle, self.epoch))

    def take_engines(self) -> list[WorkerHandle]:
        """Return the engines that an earlier gateway has left, once: whoever takes them adopts or
        stops each."""
        left, self._left_engines = self._left_engines, []
        return left

    async def adopt_engine(
        self,
        handle: WorkerHandle,
        *,
        check: Callable[[Worker], Awaitable[None]],
        on_exit: Callable[[str], None],
    ) -> Worker:
        """Take over an engine that an earlier gateway has left, once it serves and `check` has
        found it to be of use. Raises why it is of none; then nothing of it is left. Whoever cancels
        it leaves the engine, or stops it."""
        record, worker = self._add_record(handle, on_exit), Worker.of(handle, self.epoch)
        try:
            await self.launcher.wait_ready(handle.worker_id)
            await check(worker)
            if record.reason:
                raise WorkerCrashed(record.reason)
        except BaseException as error:
            self._records.pop(handle.worker_id, None)
            await worker.channel.close()
            if not isinstance(error, asyncio.CancelledError):
                await self.stop_left_worker(handle, describe(error))
            raise
        return self._note_adopted(record, worker)

    async def stop_left_worker(self, handle: WorkerHandle, reason: str) -> None:
        """Kill a worker that an earlier gateway has left and nobody adopts; return when nothing of
        it is left."""
        self._log.info("worker_not_adopted", worker_id=handle.worker_id, reason=reason)
        self._write_end(handle.worker_id, reason)
        await self._end(handle.worker_id, at_once=True)

    def _note_adopted(self, record: WorkerRecord, worker: Worker) -> Worker:
        self._log.info("worker_adopted", worker_id=record.worker_id, run_id=record.run_id)
        return self._note_ready(record, worker)

    def _add_record(
        self, about: WorkerHandle | WorkerSpec, on_exit: Callable[[str], None]
    ) -> WorkerRecord:
        record = self._records[about.worker_id] = WorkerRecord(
            worker_id=about.worker_id,
            kind=about.kind,
            session_id=about.session_id,
            run_id=about.run_id,
            on_exit=on_exit,
        )
        return record

    async def close(self, *, leaving: bool = False) -> None:
        """Stop every worker, or, if they are left to the next gateway, those that only start. Those
        that do not end in time are left as well."""
        asking = [*self._given_up.values(), *self._ends.values()]
        for task in (*self._watchers, *asking):
            task.cancel()
        records = list(self._records.values())
        self._records.clear()
        for record in records:
            if not leaving:
                self._write_end(record.worker_id, "the gateway stopped")
            if record.worker is not None:
                await record.worker.channel.close()
        await self.launcher.close(leaving=leaving)
        await asyncio.gather(*asking, return_exceptions=True)

    def all(self) -> list[WorkerRecord]:
        """Return the workers that start or serve."""
        return list(self._records.values())

    async def start(
        self, spec: WorkerSpec, *, place: str, on_exit: Callable[[str], None]
    ) -> Worker:
        """Start a worker, and return it once it serves. What its callers cannot know (its id and
        secret, the level of its log, how long it may take to stop) is filled in here.

        `place` is the key of its place. `on_exit` is called with a sentence when the worker ends
        without having been stopped. A worker that crashes in native code before it is ready, or
        ends in that very moment, is started a second time.
        Raises `WorkerStartFailed`; then nothing of the worker is left."""
        try:
            return await self._start(self._identified(spec), on_exit, place)
        except WorkerCrashed as error:
            self._log.warning(
                "worker_started_again", session_id=spec.session_id, reason=error.message
            )
        return await self._start(self._identified(spec), on_exit, place)

    def _identified(self, spec: WorkerSpec) -> WorkerSpec:
        """Return the specification of one more worker like this."""
        return spec.model_copy(
            update={
                "worker_id": self._new_id(spec.kind, spec.session_id),
                "secret": secrets.token_urlsafe(32),
                "log_level": self.settings.log_level,
                "stop_timeout": WORKER_STOP_TIMEOUT,
            }
        )

    def explain(self, place: str) -> str:
        """Say what the worker that starts at a place waits for; "" if none does, or for nothing."""
        if (worker_id := self._starting.get(place)) is None:
            return ""
        return self.launcher.explain(worker_id)

    async def stop(self, worker: Worker, *, reason: str, at_once: bool = False) -> None:
        """Stop a worker, or kill it `at_once`; return when nothing of it is left, however long that
        takes."""
        if self._records.pop(worker.worker_id, None) is not None:
            self._write_end(worker.worker_id, reason)
        await worker.channel.close()
        await self._end(worker.worker_id, at_once=at_once)

    async def suspend(self, worker: Worker, *, timeout: float) -> None:
        """Have the host move the state of a worker that cannot sleep by itself off its devices.
        Raises `SuspendFailed`; then the worker is to be ended."""
        await self.launcher.suspend(worker.worker_id, lease=worker.lease, timeout=timeout)

    async def resume(self, worker: Worker, *, timeout: float) -> None:
        """The way back. Raises as `suspend`."""
        await self.launcher.resume(worker.worker_id, lease=worker.lease, timeout=timeout)

    def give_up(self, worker: Worker, reason: str) -> None:
        """Kill a worker that does not answer, and report its end when nothing of it is left. Does
        nothing for one that has ended or was given up."""
        worker_id = worker.worker_id
        if worker_id in self._records and worker_id not in self._given_up:
            task = asyncio.create_task(self._give_up(worker_id, reason), name="worker-given-up")
            self._given_up[worker_id] = task
            task.add_done_callback(lambda _: self._given_up.pop(worker_id))

    async def end(self, worker: Worker, *, reason: str) -> None:
        """As `give_up`; return when nothing of the worker is left, and its end was reported."""
        self.give_up(worker, reason=reason)
        if (task := self._given_up.get(worker.worker_id)) is not None:
            await asyncio.shield(task)

    async def _give_up(self, worker_id: str, reason: str) -> None:
        self._log.error("worker_given_up", worker_id=worker_id, reason=reason)
        await self._ask_to_end(worker_id, at_once=True)
        if (record := self._records.get(worker_id)) is not None:
            await self._note_end(record, reason)

    async def _end(self, worker_id: str, *, at_once: bool) -> None:
        """Return when nothing is left of a worker. It goes on when whoever waits for it does not
        any more; whoever comes then waits for the same."""
        which = worker_id, at_once
        if which not in self._ends:
            asking = self._ask_to_end(worker_id, at_once=at_once)
            self._ends[which] = asyncio.create_task(asking, name=f"end-{worker_id}")
            self._ends[which].add_done_callback(lambda _: self._ends.pop(which))
        await asyncio.shield(self._ends[which])

    async def _ask_to_end(self, worker_id: str, *, at_once: bool) -> None:
        began = time.monotonic()
        while True:
            try:
                await self.launcher.stop(worker_id, at_once=at_once)
                return
            except WorkerMayRun as error:
                self._log.error(
                    "worker_not_stopped",
                    worker_id=worker_id,
                    reason=error.message,
                    seconds=round(time.monotonic() - began, 1),
                )
            await asyncio.sleep(_ASK_AGAIN)

    def _new_id(self, kind: WorkerKind, session_id: str) -> str:
        prefix = f"{kind}-{session_id}"
        number = self._next_number[prefix]
        self._next_number[prefix] += 1
        return f"{prefix}-{number}"

    async def _start(self, spec: WorkerSpec, on_exit: Callable[[str], None], place: str) -> Worker:
        worker_id = self._starting[place] = spec.worker_id
        record = self._add_record(spec, on_exit)
        self.database.write_soon(
            insert(workers),
            {
                "id": worker_id,
                "kind": spec.kind,
                "session_id": spec.session_id,
                "run_id": spec.run_id,
                "state": record.state,
                "started_at": record.started_at,
            },
        )
        try:
            handle = await self.launcher.start(spec)
            await self.launcher.wait_ready(worker_id)
            if record.reason:
                raise WorkerCrashed(record.reason)
        except BaseException as error:
            self._records.pop(worker_id, None)
            reason = error.message if isinstance(error, TandemError) else "the start was cancelled"
            self._write_end(worker_id, reason)
            self._log.warning("worker_start_failed", worker_id=worker_id, reason=reason)
            if isinstance(error, WorkerMayRun) or not isinstance(error, TandemError):
                await self._end(worker_id, at_once=True)
            if isinstance(error, WorkerMayRun):
                raise WorkerStartFailed(error.message) from error
            raise
        finally:
            if self._starting.get(place) == worker_id:
                del self._starting[place]
        self._log.info(
            "worker_ready",
            worker_id=worker_id,
            session_id=spec.session_id,
            run_id=spec.run_id,
            seconds=round(time.time() - record.started_at, 3),
        )
        return self._note_ready(record, Worker.of(handle, self.epoch, lease=spec.lease))

    def _note_ready(self, record: WorkerRecord, worker: Worker) -> Worker:
        record.worker = worker
        record.details = self.launcher.describe(record.worker_id)
        record.state = "ready"
        self.database.write_soon(
            update(workers)
            .where(workers.c.id == record.worker_id)
            .values(state="ready", pid=record.details.pid)
        )
        return worker

    async def _note_exits(self, exits: AsyncIterator[WorkerExit]) -> None:
        async for exit_ in exits:
            record = self._records.get(exit_.worker_id)
            if record is None:
                continue
            if record.worker is None:  # in the moment when it became ready
                self.metrics.worker_exits.labels(kind=record.kind).inc()
                record.reason = exit_.reason
                continue
            await self._note_end(record, exit_.reason)

    async def _note_end(self, record: WorkerRecord, reason: str) -> None:
        """Report the end of a worker that served and was not asked to end."""
        assert record.worker is not None
        self.metrics.worker_exits.labels(kind=record.kind).inc()
        del self._records[record.worker_id]
        self._write_end(record.worker_id, reason)
        try:
            record.on_exit(reason)
            await record.worker.channel.close()
        except Exception:  # noqa: BLE001 - later exits must still be handled
            self._log.exception("exit_not_handled", worker_id=record.worker_id)

    async def await_exit(self, ended: asyncio.Event, *, patience: float) -> None:
        """Wait until the end of a worker whose connection broke has been reported, or it is clear
        that only the connection broke: whoever would report it answers, and has not within
        `patience` seconds."""
        while not ended.is_set():
            reports = self.launcher.reports
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await ended.wait()
            if reports and self.launcher.reports:
                return

    def warnings(self) -> list[str]:
        """Return what an operator should know of the workers' versions, in sentences."""
        others: defaultdict[str, list[str]] = defaultdict(list)
        for record in self._records.values():
            if record.version not in ("", own_version()):
                others[record.version].append(record.worker_id)
        return [
            f"the gateway has Tandem {own_version()}, and {version} have: {', '.join(those)}; "
            "workers of an earlier image go on until their session ends, others need an image of "
            "the gateway's version"
            for version, those in others.items()
        ]

    def _write_end(self, worker_id: str, reason: str) -> None:
        self.database.write_soon(
            update(workers)
            .where(workers.c.id == worker_id)
            .values(state="ended", reason=reason, ended_at=time.time())
        )
