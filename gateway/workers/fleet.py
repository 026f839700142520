"""The workers of this gateway, with their secrets, channels and database rows."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sqlalchemy import insert, select, update

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.metrics import Metrics
from gateway.storage.database import Database
from gateway.storage.tables import workers
from gateway.workers.epoch import Epoch
from gateway.workers.launchers.base import Launcher
from tandem.channels import worker_channel
from tandem.errors import (
    GatewaySuperseded,
    TandemError,
    WorkerCrashed,
    WorkerDied,
    WorkerMayRun,
    WorkerStartFailed,
)
from tandem.fencing import LEASE_METADATA_KEY
from tandem.settings import GatewaySettings, SamplerSettings, TrainerSettings
from tandem.telemetry import get_log
from tandem.worker import (
    PROTOCOL,
    PROTOCOL_METADATA_KEY,
    SECRET_METADATA_KEY,
    VERSION_METADATA_KEY,
    TrainingSpec,
    WorkerDetails,
    WorkerExit,
    WorkerHandle,
    WorkerKind,
    WorkerSpec,
    own_version,
)

_FIRST_WAIT = 0.5
_JITTER = 0.2
_ASK_AGAIN = 5.0
"""Seconds until a launcher that could not say that a worker is gone is asked again."""


@dataclass(eq=False)
class Worker:
    """A worker that serves. `identity` goes with every call, and so does the fencing token of its
    lease, if it has one; `silent_since` is when it was asked for the heartbeat that it has not
    answered, on the monotonic clock."""

    handle: WorkerHandle
    channel: grpc.aio.Channel
    epoch: Epoch
    identity: tuple[tuple[str, str], ...] = field(repr=False)
    lease: int = 0
    silent_since: float | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        if not self.lease:
            return self.identity
        return (*self.identity, (LEASE_METADATA_KEY, str(self.lease)))

    @property
    def worker_id(self) -> str:
        return self.handle.worker_id

    @property
    def silent_for(self) -> float:
        """Seconds for which it has not answered its heartbeat; 0 if it does."""
        return 0.0 if self.silent_since is None else time.monotonic() - self.silent_since

    @property
    def silence(self) -> str:
        """Say that it does not answer its heartbeat; "" if it does."""
        if self.silent_since is None:
            return ""
        return f"the {self.handle.kind} has not answered its heartbeat for {self.silent_for:.0f} s"


@dataclass
class WorkerRecord:
    """What the gateway knows of a worker that starts or serves.

    `state` is "starting", "ready" or, while it does not answer its heartbeat, "unresponsive";
    `worker` and `details` are set when it is ready, and `version` when it has answered its first
    heartbeat. `reason` says why it ended before that.
    """

    worker_id: str
    kind: WorkerKind
    session_id: str
    run_id: str
    on_exit: Callable[[str], None]
    state: str = "starting"
    started_at: float = field(default_factory=time.time)
    reason: str = ""
    worker: Worker | None = None
    details: WorkerDetails = field(default_factory=WorkerDetails)
    version: str = ""


@dataclass
class Backoff:
    """How long to wait before a worker that failed is started again. Durations in seconds.

    The waits are about 0.5, 1, 2, 4, … 30, 30, each made shorter by up to a fifth, so that workers
    which failed together do not start together. After one that has done some work they begin anew:
    what ended it then is not what kept those before from it.
    """

    cap: float = 30.0
    uniform: Callable[[], float] = random.random
    failures: int = 0

    def worked(self) -> None:
        """Note that the worker has done what it was started for."""
        self.failures = 0

    def failed(self) -> float:
        """Note that the worker failed or could not be started; return how long to wait."""
        wait = min(self.cap, _FIRST_WAIT * 2.0 ** min(self.failures, 32))
        self.failures += 1
        return wait * (1 - _JITTER * self.uniform())


@dataclass(eq=False, kw_only=True)
class Fleet:
    """Starts and stops workers by a launcher, and keeps a record and a row of each.

    Whatever returns when nothing of a worker is left returns only when that is known: the launcher
    is asked again and again, also when nobody waits for the answer any more. A gateway that stops
    meanwhile leaves the worker to the next one, which finds it (`open`).
    """

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
            asyncio.create_task(self._ask_for_heartbeats(), name="worker-heartbeats"),
        ]

    async def _claim(self, handle: WorkerHandle) -> None:
        """Let a worker hear of this gateway's epoch, so that it hears no earlier one any more."""
        with suppress(grpc.aio.AioRpcError, GatewaySuperseded):
            async with self.reach(handle) as worker:
                await self._check_health(worker)

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
        worker = self._worker_of(handle)
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
        return self._note_adopted(self._add_record(handle, on_exit), self._worker_of(handle))

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
        record, worker = self._add_record(handle, on_exit), self._worker_of(handle)
        try:
            await self.launcher.wait_ready(handle.worker_id)
            await check(worker)
            if record.reason:
                raise WorkerCrashed(record.reason)
        except BaseException as error:
            self._records.pop(handle.worker_id, None)
            await worker.channel.close()
            if not isinstance(error, asyncio.CancelledError):
                await self.stop_left_worker(handle, str(error))
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
        self,
        *,
        kind: WorkerKind,
        session_id: str,
        model: BaseModelEntry,
        run_id: str = "",
        first_run: str = "",
        replica: int = 0,
        training: TrainingSpec | None = None,
        trainer: TrainerSettings | None = None,
        sampler: SamplerSettings | None = None,
        max_lora_rank: int = 0,
        place: str = "",
        group: str = "",
        devices: tuple[str, ...] = (),
        host_memory: int = 0,
        lease: int = 0,
        start_timeout: float,
        on_exit: Callable[[str], None],
    ) -> Worker:
        """Start a worker on its devices, with the fencing token of its lease; return it once it
        serves.

        `run_id` is the run that a trainer was made for, which names it, and `first_run` the one
        that it begins with. `training` says what it trains, and `trainer` how; `sampler` says how a
        sampler serves, `max_lora_rank` the largest rank of its adapters, and `replica` which of the
        sampler's engines it is. `place` is the key of its place, and `group`, `devices` and
        `host_memory` are what it has there. `on_exit` is
        called with a sentence when the worker ends without having been stopped. A worker that
        crashes in native code before it is ready, or ends in that very moment, is started a second
        time.
        Raises `WorkerStartFailed`; then nothing of the worker is left.
        """
        settings = self.settings
        spec = WorkerSpec(
            worker_id=self._new_id(kind, session_id),
            kind=kind,
            secret=secrets.token_urlsafe(32),
            model_name=model.name,
            model_path=model.path,
            session_id=session_id,
            run_id=run_id,
            first_run=first_run,
            replica=replica,
            training=training,
            group=group,
            devices=devices,
            host_memory=host_memory,
            lease=lease,
            log_level=settings.log_level,
            start_timeout=start_timeout,
            stop_timeout=settings.worker_stop_timeout,
            trainer=trainer,
            sampler=sampler and sampler.model_copy(update={"max_lora_rank": max_lora_rank}),
        )
        try:
            return await self._start(spec, on_exit, place)
        except WorkerCrashed as error:
            self._log.warning("worker_started_again", session_id=session_id, reason=error.message)
        again = {
            "worker_id": self._new_id(kind, session_id),
            "secret": secrets.token_urlsafe(32),
        }
        return await self._start(spec.model_copy(update=again), on_exit, place)

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

    def give_up(self, worker: Worker, *, reason: str) -> None:
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
        worker = self._worker_of(handle)
        worker.lease = spec.lease
        return self._note_ready(record, worker)

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

    def _worker_of(self, handle: WorkerHandle) -> Worker:
        return Worker(
            handle=handle,
            channel=worker_channel(handle),
            epoch=self.epoch,
            identity=((SECRET_METADATA_KEY, handle.secret), *self.epoch.metadata),
        )

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

    async def _ask_for_heartbeats(self) -> None:
        """Ask the workers again and again, all at once. A worker that does not answer is shown, and
        given up after a time."""
        while True:
            await asyncio.sleep(self.settings.worker_heartbeat)
            ready = [(r, r.worker) for r in self._records.values() if r.worker is not None]
            asked = (self._ask_for_heartbeat(record, worker) for record, worker in ready)
            for fault in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(fault, Exception):  # its channel was closed: a cancellation
                    self._log.error("heartbeat_failed", exc_info=fault)

    async def _ask_for_heartbeat(self, record: WorkerRecord, worker: Worker) -> None:
        asked_at, answers = time.monotonic(), True
        try:
            self._note_version(record, worker, await self._check_health(worker))
        except grpc.aio.AioRpcError as error:  # any other error than this is an answer, or its end
            answers = error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        if not answers and worker.silent_since is not None:
            most = self.settings.worker_unresponsive_timeout
            if time.monotonic() - worker.silent_since > most:
                reason = f"the {record.kind} did not answer its heartbeat for {most:g} s"
                self.give_up(worker, reason=reason)
        if answers == (worker.silent_since is None):
            return
        worker.silent_since, record.state = (
            (None, "ready") if answers else (asked_at, "unresponsive")
        )
        self._log.warning(
            "worker_answers_again" if answers else "worker_unresponsive",
            worker_id=worker.worker_id,
            session_id=record.session_id,
            run_id=record.run_id,
        )

    async def _check_health(self, worker: Worker) -> dict[str, str]:
        """Return what a worker that answers says of itself."""
        call = health_pb2_grpc.HealthStub(worker.channel).Check(
            health_pb2.HealthCheckRequest(),
            metadata=worker.metadata,
            timeout=2 * self.settings.worker_heartbeat,
        )
        try:
            await call
        except grpc.aio.AioRpcError as error:
            self.epoch.check(error)
            raise
        return {key: str(value) for key, value in await call.trailing_metadata() or ()}

    def _note_version(self, record: WorkerRecord, worker: Worker, about: dict[str, str]) -> None:
        """Tell once of a worker of another version, such as that of the gateway before, and give up
        one that speaks another protocol: it is replaced by one of today's image."""
        if record.version or VERSION_METADATA_KEY not in about:
            return
        record.version = about[VERSION_METADATA_KEY]
        protocol = about[PROTOCOL_METADATA_KEY]
        if record.version != own_version():
            self._log.warning(
                "worker_of_another_version",
                worker_id=record.worker_id,
                version=record.version,
                protocol=protocol,
                own_version=own_version(),
            )
        if protocol != str(PROTOCOL):
            self.give_up(
                worker,
                reason=f"the {record.kind} has Tandem {record.version}, whose protocol is "
                f"{protocol}, and that of the gateway is {PROTOCOL}",
            )

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
