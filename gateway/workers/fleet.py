"""The workers of this gateway: a launcher, their secrets, their channels and their rows."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import grpc.aio
from sqlalchemy import delete, insert, select, update

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.metrics import Metrics
from gateway.storage.database import Database
from gateway.storage.tables import workers
from gateway.workers.launchers.base import Launcher, WorkerHandle
from tandem.errors import TandemError, WorkerCrashed
from tandem.settings import GatewaySettings
from tandem.telemetry import get_log
from tandem.worker import GRPC_OPTIONS, SECRET_METADATA_KEY, TrainingSpec, WorkerKind, WorkerSpec

ChannelFactory = Callable[[str], grpc.aio.Channel]


def open_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=GRPC_OPTIONS)


@dataclass(frozen=True)
class Worker:
    """A worker that serves. `metadata` goes with every call."""

    handle: WorkerHandle
    channel: grpc.aio.Channel
    metadata: tuple[tuple[str, str], ...] = field(repr=False)

    @property
    def worker_id(self) -> str:
        return self.handle.worker_id


@dataclass
class WorkerStatus:
    """What the status says of a worker. `state`: starting, ready."""

    worker_id: str
    kind: WorkerKind
    session_id: str
    run_id: str
    state: str
    started_at: float
    on_exit: Callable[[str], None]
    worker: Worker | None = None


class Fleet:
    def __init__(
        self,
        *,
        settings: GatewaySettings,
        database: Database,
        launcher: Launcher,
        metrics: Metrics,
        channel_factory: ChannelFactory = open_channel,
    ) -> None:
        self._settings = settings
        self._database = database
        self._launcher = launcher
        self._metrics = metrics
        self._channel_factory = channel_factory
        self._workers: dict[str, WorkerStatus] = {}
        self._numbers: defaultdict[str, int] = defaultdict(int)
        self._watcher: asyncio.Task[None] | None = None
        self._log = get_log()

    async def open(self) -> None:
        """The workers of an earlier gateway are gone with it; their rows say so from now on."""
        await self._database.write(
            update(workers)
            .where(workers.c.state != "ended")
            .values(state="ended", reason="the gateway restarted", ended_at=time.time())
        )
        for row in await self._database.read(select(workers.c.id)):
            prefix, _, number = row["id"].rpartition("-")
            self._numbers[prefix] = max(self._numbers[prefix], int(number) + 1)
        exits = self._launcher.watch()

        async def watch() -> None:
            async for exit_ in exits:
                try:
                    self._ended(exit_.worker_id, exit_.reason)
                except Exception:  # noqa: BLE001 - the ends of others must still be heard of
                    self._log.exception("exit_not_handled", worker_id=exit_.worker_id)

        self._watcher = asyncio.create_task(watch(), name="worker-watcher")

    async def close(self) -> None:
        """Stops every worker."""
        if self._watcher is not None:
            self._watcher.cancel()
        running = list(self._workers.values())
        self._workers.clear()
        for status in running:
            self._note_end(status.worker_id, "the gateway stopped")
            if status.worker is not None:
                await status.worker.channel.close()
        await self._launcher.close()

    def all(self) -> list[WorkerStatus]:
        return list(self._workers.values())

    async def start(
        self,
        *,
        kind: WorkerKind,
        session_id: str,
        model: BaseModelEntry,
        run_id: str = "",
        training: TrainingSpec | None = None,
        max_lora_rank: int = 0,
        on_exit: Callable[[str], None],
    ) -> Worker:
        """Returns when the worker serves. Raises `WorkerStartFailed`; then nothing is left of it.

        `training` is what a trainer trains, `max_lora_rank` the largest that a sampler serves.
        `on_exit` is told, in one sentence, when the worker ends without having been stopped.
        One that crashes in native code before it is ready has done nothing yet, and is started
        once more.
        """
        start = partial(
            self._start,
            kind=kind,
            session_id=session_id,
            model=model,
            run_id=run_id,
            training=training,
            max_lora_rank=max_lora_rank,
            on_exit=on_exit,
        )
        try:
            return await start()
        except WorkerCrashed as error:
            self._log.warning("worker_started_again", session_id=session_id, reason=error.message)
            return await start()

    async def _start(
        self,
        *,
        kind: WorkerKind,
        session_id: str,
        model: BaseModelEntry,
        run_id: str,
        training: TrainingSpec | None,
        max_lora_rank: int,
        on_exit: Callable[[str], None],
    ) -> Worker:
        prefix = f"{kind}-{session_id}"
        worker_id = f"{prefix}-{self._numbers[prefix]}"
        self._numbers[prefix] += 1
        status = WorkerStatus(
            worker_id=worker_id,
            kind=kind,
            session_id=session_id,
            run_id=run_id,
            state="starting",
            started_at=time.time(),
            on_exit=on_exit,
        )
        self._workers[worker_id] = status
        self._database.write_soon(
            insert(workers),
            {
                "id": worker_id,
                "kind": kind,
                "session_id": session_id,
                "run_id": run_id,
                "state": "starting",
                "reason": "",
                "pid": 0,
                "started_at": status.started_at,
            },
        )
        spec = WorkerSpec(
            worker_id=worker_id,
            kind=kind,
            secret=secrets.token_urlsafe(32),
            model_name=model.name,
            model_path=model.path,
            session_id=session_id,
            run_id=run_id,
            training=training,
            log_level=self._settings.log_level,
            trainer=self._settings.trainer if kind == "trainer" else None,
            sampler=self._settings.sampler.model_copy(update={"max_lora_rank": max_lora_rank})
            if kind == "sampler"
            else None,
        )
        try:
            handle = await self._launcher.start(spec)
            await self._launcher.wait_ready(worker_id)
        except BaseException as error:
            self._workers.pop(worker_id, None)
            reason = error.message if isinstance(error, TandemError) else "the start was cancelled"
            self._note_end(worker_id, reason)
            if not isinstance(error, TandemError):
                await self._launcher.stop(worker_id)
            self._log.warning("worker_start_failed", worker_id=worker_id, reason=reason)
            raise
        status.worker = Worker(
            handle=handle,
            channel=self._channel_factory(handle.address),
            metadata=((SECRET_METADATA_KEY, spec.secret),),
        )
        status.state = "ready"
        self._database.write_soon(
            update(workers).where(workers.c.id == worker_id).values(state="ready", pid=handle.pid)
        )
        self._log.info(
            "worker_ready",
            worker_id=worker_id,
            session_id=session_id,
            run_id=run_id,
            seconds=round(time.time() - status.started_at, 3),
        )
        return status.worker

    async def stop(self, worker: Worker, *, reason: str) -> None:
        """Ends a worker; returns when nothing of it is left."""
        if self._workers.pop(worker.worker_id, None) is not None:
            self._note_end(worker.worker_id, reason)
        await worker.channel.close()
        await self._launcher.stop(worker.worker_id)

    def forget_rows_before(self, cutoff: float) -> None:
        """Drops the rows of workers that ended before."""
        self._database.write_soon(delete(workers).where(workers.c.ended_at < cutoff))

    def _ended(self, worker_id: str, reason: str) -> None:
        status = self._workers.pop(worker_id, None)
        if status is None:
            return
        self._metrics.worker_exits.labels(kind=status.kind).inc()
        self._note_end(worker_id, reason)
        status.on_exit(reason)

    def _note_end(self, worker_id: str, reason: str) -> None:
        self._database.write_soon(
            update(workers)
            .where(workers.c.id == worker_id)
            .values(state="ended", reason=reason, ended_at=time.time())
        )
