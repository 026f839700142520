"""Processes: the running workers of this gateway, with their secrets, channels and heartbeats.

A launcher starts and ends processes. `Processes` gives each process a secret, opens a channel to
it, asks for its heartbeat, and reports its unexpected end. Rows of the table name processes by
their ids."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import grpc
import grpc.aio

from gateway.metrics import Metrics
from gateway.workers.epoch import Epoch
from gateway.workers.launchers.base import Launcher, Launchers
from gateway.workers.worker import Worker, WorkerRecord
from gateway.workers.worker_use import WorkerUseMeter
from tandem.errors import GatewaySuperseded, WorkerCrashed, WorkerStartFailed, describe
from tandem.protocol.process_use import USE_METADATA_KEY
from tandem.protocol.worker import (
    PROTOCOL,
    PROTOCOL_METADATA_KEY,
    VERSION_METADATA_KEY,
    WORKER_STOP_TIMEOUT,
    WorkerExit,
    WorkerHandle,
    WorkerKind,
    WorkerSpec,
    own_version,
)
from tandem.protocol.worker_health import wait_until_serving
from tandem.settings.gateway import GatewaySettings
from tandem.telemetry import get_log

MOST_SECONDS = 5.0
"""The most seconds between heartbeats."""
_ASKED_BEFORE = 5
"""Heartbeats of a silent worker before it is given up."""
_LOOK_SECONDS = 0.5
"""Seconds between two looks at the launcher."""
_STOP_AGAIN_SECONDS = 5.0
_STOP_SECONDS = 2 * WORKER_STOP_TIMEOUT + 30.0
"""Seconds for the end of a process without a row, or of any process when the gateway closes."""


class ProcessReports(Protocol):
    """Receives reports about processes. The supervisor implements it."""

    def note_exit(self, key: str, process: str, reason: str) -> None:
        """Nothing is left of a process that ended by itself."""
        ...

    def note_failure(self, key: str, process: str, reason: str) -> None:
        """A process is useless, and should end."""
        ...

    def note_launcher(self, launcher: str, *, answers: bool) -> None:
        """A launcher answers, or does not."""
        ...

    def poke(self) -> None:
        """A process has become silent, or answers again."""
        ...


@dataclass(eq=False, kw_only=True)
class Processes:
    settings: GatewaySettings
    launchers: Launchers
    metrics: Metrics
    epoch: Epoch
    use: WorkerUseMeter | None = None

    def __post_init__(self) -> None:
        self._records: dict[str, WorkerRecord] = {}
        self._left: dict[str, WorkerHandle] = {}
        self._loading: set[str] = set()
        """Processes of an earlier gateway that did not serve when they were found."""
        self._may_run: set[str] = set()
        """Processes without a known end, also of an earlier gateway."""
        self._tasks: list[asyncio.Task[None]] = []
        self._log = get_log()
        told = "Workers that start or serve."
        self.metrics.watch("workers", told, lambda: len(self.list_records()))

    async def find_processes(self, reports: ProcessReports) -> None:
        """Find the processes of an earlier gateway for `take_up`, and begin to watch. On return,
        each of them has heard of this gateway, or does not answer."""
        self._reports = reports
        launchers = {*self.launchers.values()}
        exits = [each.watch() for each in launchers]
        found = await asyncio.gather(*(each.list() for each in launchers))
        self._left = {handle.worker_id: handle for handles in found for handle in handles}
        self._may_run.update(self._left)
        await asyncio.gather(*(self._claim(each) for each in self._left.values()))
        self._tasks = [
            *(asyncio.create_task(self._note_exits(each), name="worker-exits") for each in exits),
            asyncio.create_task(self._ask_heartbeats(), name="worker-heartbeats"),
            *(asyncio.create_task(self._watch(each), name="worker-launcher") for each in launchers),
        ]

    async def close(self, *, leaving: bool) -> None:
        """Stop every process, or leave them to the next gateway."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        records = list(self._records.values())
        self._records.clear()
        for record in records:
            if record.worker is not None:
                await record.worker.channel.close()
        if not leaving:
            answering = [each for each in self._may_run if self.launcher_of(each).reports]
            await asyncio.gather(*(self._stop_in_time(each, at_once=False) for each in answering))
        await asyncio.gather(*(each.close() for each in {*self.launchers.values()}))

    async def _stop_in_time(self, process: str, *, at_once: bool) -> bool:
        """Stop a process. Return whether nothing is left of it."""
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self.stop(process, at_once=at_once)
        except Exception as error:  # noqa: BLE001 - asked again, or found by the next gateway
            reason = describe(error) or self.launcher_of(process).explain(process)
            self._log.error("worker_not_stopped", worker_id=process, reason=reason)
            return False
        return True

    def list_records(self) -> list[WorkerRecord]:
        """Return the processes that start or serve."""
        return list(self._records.values())

    def has(self, worker: Worker) -> bool:
        """Whether a process serves: its end was not reported."""
        record = self._records.get(worker.worker_id)
        return record is not None and record.worker is worker

    # --- Starts and ends ----------------------------------------------------------------------

    async def start(self, spec: WorkerSpec, *, key: str) -> Worker:
        """Start a process for a row, and return once it serves. Raises `WorkerStartFailed` or
        `WorkerMayRun`, after which the caller stops it."""
        spec = spec.model_copy(
            update={
                "secret": secrets.token_urlsafe(32),
                "log_level": self.settings.log_level,
                "stop_timeout": WORKER_STOP_TIMEOUT,
            }
        )
        record, launcher = self._add_record(spec, key), self.launchers[spec.kind]
        self._may_run.add(spec.worker_id)
        try:
            handle = await launcher.start(spec)
            record.phase = "it loads the model"
            await _until_serving(record, handle, timeout=spec.start_timeout)
        except BaseException:
            self._records.pop(spec.worker_id, None)
            raise
        self._log.info("worker_ready", worker_id=spec.worker_id, run_id=spec.run_id)
        record.worker = Worker.of(handle, self.epoch, lease=spec.lease)
        return record.worker

    async def take_up(self, process: str, *, key: str, lease: int, timeout: float) -> Worker | None:
        """Return a process of an earlier gateway, or None if there is none. A loading one has
        `timeout` seconds until it serves. Raises `WorkerStartFailed` or `WorkerMayRun`."""
        record = self._records.get(process)
        if record is not None and record.worker is not None:
            record.worker.lease = lease
            return record.worker
        handle = self._left.get(process)
        if handle is None:  # it was asked to end, or something may be left of its start
            await self.stop(process, at_once=True)
            return None
        record = self._add_record(handle, key)
        if process in self._loading:
            try:
                await _until_serving(record, handle, timeout=timeout)
            except BaseException:
                self._records.pop(process, None)
                raise
            self._loading.discard(process)
        self._left.pop(process, None)
        self._log.info("worker_taken_up", worker_id=process, run_id=handle.run_id)
        worker = Worker.of(handle, self.epoch, lease=lease)
        worker.left = worker.busy = True
        record.worker = worker
        return worker

    async def stop(self, process: str, *, at_once: bool) -> None:
        """Return when nothing is left of a process. Its calls end at once. Raises
        `WorkerMayRun`."""
        record = self._records.pop(process, None)
        if record is not None and record.worker is not None:
            await record.worker.channel.close()
        self._left.pop(process, None)
        await self.launcher_of(process).stop(process, at_once=at_once)
        self._may_run.discard(process)

    async def stop_strangers(self, kind: str, is_known: Callable[[str], bool]) -> None:
        """Stop the processes of a kind that an earlier gateway has left and that have no row.
        Return when nothing of them is left."""
        strangers = [
            handle.worker_id
            for handle in self._left.values()
            if handle.kind == kind and not is_known(handle.worker_id)
        ]
        await asyncio.gather(*(self._stop_stranger(each) for each in strangers))

    async def _stop_stranger(self, process: str) -> None:
        self._log.warning("stranger_stopped", worker_id=process)
        while True:
            if await self._stop_in_time(process, at_once=True):
                return
            await asyncio.sleep(_STOP_AGAIN_SECONDS)

    def fail(self, worker: Worker, reason: str) -> None:
        """Report a useless process."""
        record = self._records.get(worker.worker_id)
        if record is not None and record.worker is worker:
            self._log.error("worker_given_up", worker_id=worker.worker_id, reason=reason)
            self._reports.note_failure(record.key, worker.worker_id, reason)

    def explain(self, process: str) -> str:
        """Return the launcher's reason for the wait for a start or an end, or the phase of a start,
        or ""."""
        if reason := self.launcher_of(process).explain(process):
            return reason
        record = self._records.get(process)
        return record.phase if record is not None and record.worker is None else ""

    def launcher_of(self, process: str) -> Launcher:
        return self.launchers[cast(WorkerKind, process.partition("-")[0])]

    def _add_record(self, about: WorkerHandle | WorkerSpec, key: str) -> WorkerRecord:
        record = self._records[about.worker_id] = WorkerRecord(
            worker_id=about.worker_id,
            key=key,
            kind=about.kind,
            session_id=about.session_id,
            run_id=about.run_id,
        )
        return record

    async def _claim(self, handle: WorkerHandle) -> None:
        """Send a process this gateway's epoch, so that it refuses earlier gateways."""
        worker = Worker.of(handle, self.epoch)
        try:
            with suppress(GatewaySuperseded):
                if await worker.is_loading(timeout=2 * self._heartbeat_seconds):
                    self._loading.add(handle.worker_id)
        finally:
            await worker.channel.close()

    # --- Watching -----------------------------------------------------------------------------

    @property
    def _heartbeat_seconds(self) -> float:
        """Seconds between heartbeats. A worker silent for twice that is shown as unresponsive."""
        return min(MOST_SECONDS, self.settings.worker_unresponsive_timeout / _ASKED_BEFORE)

    async def _ask_heartbeats(self) -> None:
        """Ask all workers again and again. Note each silent worker."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            ready = [(r, r.worker) for r in self._records.values() if r.worker is not None]
            asked = (self._ask_heartbeat(record, worker) for record, worker in ready)
            for fault in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(fault, Exception):  # its channel was closed
                    self._log.error("heartbeat_failed", exc_info=fault)

    async def _ask_heartbeat(self, record: WorkerRecord, worker: Worker) -> None:
        asked_at, answers = time.monotonic(), True
        try:
            about = await worker.check_health(timeout=2 * self._heartbeat_seconds)
            self._note_version(record, worker, about)
            if self.use is not None:
                self.use.note_use(record.key, record.worker_id, about.get(USE_METADATA_KEY, ""))
        except grpc.aio.AioRpcError as error:  # any other error is an answer or the worker's end
            answers = error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        if answers == (worker.silent_since is None):
            return
        worker.silent_since = None if answers else asked_at
        self._reports.poke()
        self._log.warning(
            "worker_answers_again" if answers else "worker_unresponsive",
            worker_id=worker.worker_id,
            session_id=record.session_id,
            run_id=record.run_id,
        )

    def _note_version(self, record: WorkerRecord, worker: Worker, about: dict[str, str]) -> None:
        """Log a worker of another version, and give up one with another protocol, since its
        replacement runs today's image."""
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
            self.fail(
                worker,
                f"the {record.kind} has Tandem {record.version}, whose protocol is {protocol}, and "
                f"that of the gateway is {PROTOCOL}",
            )

    async def _note_exits(self, exits: AsyncIterator[WorkerExit]) -> None:
        async for exit_ in exits:
            self._left.pop(exit_.worker_id, None)
            self._may_run.discard(exit_.worker_id)
            record = self._records.get(exit_.worker_id)
            if record is None:
                continue
            if record.worker is None:  # it starts
                if not record.ended.done():
                    record.ended.set_result(exit_)
                continue
            if record.kind != "job":  # it always ends by itself
                self.metrics.worker_exits.labels(kind=record.kind).inc()
            del self._records[exit_.worker_id]
            self._reports.note_exit(record.key, exit_.worker_id, exit_.reason)
            await record.worker.channel.close()

    async def _watch(self, launcher: Launcher) -> None:
        """Report when a launcher stops answering, and when it answers again."""
        answers = True
        while True:
            if answers != launcher.reports:
                answers = launcher.reports
                self._reports.note_launcher(launcher.name, answers=answers)
            await asyncio.sleep(_LOOK_SECONDS)

    async def await_exit(self, process: str, ended: asyncio.Event, *, patience: float) -> None:
        """Return when a process with a broken connection has `ended`, or only the connection broke.

        In the second case the launcher answers, and reports no end within `patience` seconds."""
        launcher = self.launcher_of(process)
        while not ended.is_set():
            reports = launcher.reports
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await ended.wait()
            if reports and launcher.reports:
                return

    def warnings(self) -> list[str]:
        """Return a sentence for each other version among the workers."""
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


async def _until_serving(record: WorkerRecord, handle: WorkerHandle, *, timeout: float) -> None:
    """Return once a process serves. Raises `WorkerStartFailed`, or `WorkerCrashed` after a fault in
    native code or an end just after it served."""
    check = asyncio.create_task(wait_until_serving(handle, timeout=timeout))
    try:
        either: set[asyncio.Future[Any]] = {check, record.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if record.ended.done():
            exit_, served = record.ended.result(), check.done() and not check.result()
            error = WorkerCrashed if exit_.crashed or served else WorkerStartFailed
            raise error(f"the {handle.kind} did not start: {exit_.reason}")
        if answer := check.result():
            log = f"; its log is {Path(handle.log_path).name}" if handle.log_path else ""
            raise WorkerStartFailed(
                f"the {handle.kind} did not become ready ({answer}; it had {timeout:g} s to "
                f"start){log}"
            )
    finally:
        check.cancel()
