"""`ProcessLauncher` starts workers as processes on this machine.

Each worker leads its own session and process group. The handshake of `tandem.protocol.worker` goes
over pipes."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from tandem.agent.host import why_no_mps
from tandem.agent.metrics import AgentMetrics, worker_port
from tandem.agent.pool import Child, Pool, default_command, start_child
from tandem.agent.process_groups import FILE_NAME, ProcessGroups
from tandem.agent.scratch import ScratchFolders
from tandem.agent.suspender import CudaCheckpoint, uses_gpu
from tandem.agent.worker_process import WorkerProcess
from tandem.errors import (
    CannotSleep,
    IllegalTransition,
    SuspendFailed,
    WorkerStartFailed,
    describe,
    without_paths,
)
from tandem.protocol.exit_watchers import ExitWatchers
from tandem.protocol.worker import (
    LOOPBACK,
    MAX_SPEC_BYTES,
    WorkerExit,
    WorkerHandle,
    WorkerKind,
    WorkerSpec,
)
from tandem.settings.chosen_names import is_name
from tandem.settings.sharing import Sharing
from tandem.settings.workers import TrainerSettings
from tandem.telemetry import append_line, get_log

_LOOK_SECONDS = 1.0
_REMEMBERED = 256
"""The number of exits kept for later watchers, and of stopped ids that must not start."""
_PRELOADED_BACKEND: str = TrainerSettings.model_fields["backend"].default


@dataclass(eq=False, kw_only=True)
class ProcessLauncher:
    """Does the agent's part of the gateway's `Launcher`. It tracks the leftovers of its workers.

    `command` returns the program for a kind of worker, without `--report-fd N`. Output goes to
    `logs/WORKER.log`, by default in the data directory. `pool` counts the processes to start in
    advance. `suspender` is for workers that cannot sleep. `advertised` is this host's name for
    other hosts. `metrics_port` is the agent's, and those of its workers follow (0: any)."""

    data_dir: Path
    command: Callable[[WorkerKind], list[str]] = default_command
    pool: Mapping[WorkerKind, int] = field(default_factory=dict)
    suspender: CudaCheckpoint = field(default_factory=CudaCheckpoint)
    advertised: str = ""
    logs: Path | None = None
    metrics_port: int = 0

    def __post_init__(self) -> None:
        self._logs = self.logs or self.data_dir / "logs"
        self.metrics = AgentMetrics(data_dir=self.data_dir, logs=self._logs, kinds=self._kinds)
        self._workers: dict[str, WorkerProcess] = {}
        self._ended: deque[WorkerProcess] = deque(maxlen=_REMEMBERED)
        self._stopped: deque[str] = deque(maxlen=_REMEMBERED)
        self._watchers = ExitWatchers()
        self._calls: set[asyncio.Task[None]] = set()
        """Stops and moves, which go on if their caller goes away."""
        self._removals: set[asyncio.Task[None]] = set()
        self._spawning = asyncio.Lock()
        self._closed = False
        self._log = get_log()
        self.groups = ProcessGroups(self.data_dir / FILE_NAME)
        self.scratches = ScratchFolders(self.data_dir)
        self._looking: asyncio.Task[None] | None = None
        self.idle = Pool(
            sizes=self.pool, command=self.command, quiet=self._quiet, scratches=self.scratches
        )

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        async with self._spawning:
            if self._closed:
                raise WorkerStartFailed("the launcher is closed")
            if spec.worker_id in self._workers:
                raise WorkerStartFailed(f"worker {spec.worker_id} runs already")
            if spec.worker_id in self._stopped:  # the request was late
                raise WorkerStartFailed(f"worker {spec.worker_id} was stopped before it started")
            if spec.sharing == Sharing.MPS and (why := why_no_mps()):
                raise WorkerStartFailed(f"group {spec.group} is shared by mps, but {why}")
            used = {worker.spec.metrics_port for worker in self._workers.values()}
            changes: dict[str, object] = {"metrics_port": worker_port(self.metrics_port, used)}
            if spec.lease:
                changes["no_suspender"] = self.suspender.why_not()
            spec = spec.model_copy(update=changes)
            try:
                worker = await self._spawn(spec)
            except OSError as error:
                raise WorkerStartFailed(
                    f"the {spec.kind} could not be started: {without_paths(describe(error))}"
                ) from error
            self._workers[spec.worker_id] = worker  # from here on `stop` finds it
            worker.ended.add_done_callback(lambda _: self._note_end(worker))
        try:
            handle = await worker.reported()
        except BaseException:  # a cancelled start leaves nothing behind
            await worker.kill()
            raise
        self._log.info(
            "worker_started",
            worker_id=spec.worker_id,
            framework=spec.framework,
            pid=worker.pid,
            address=handle.address,
            session_id=spec.session_id,
        )
        return handle

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        """Kill it in time even if the caller goes away.

        An unknown worker has ended, also one of an earlier agent."""
        async with self._spawning:  # waits for a worker that is being spawned
            worker = self._workers.get(worker_id)
            self._stopped.append(worker_id)
        if worker is not None:
            stopping = worker.kill() if at_once else worker.stop_worker()
            await asyncio.shield(_begin(stopping, self._calls))

    async def suspend(self, worker_id: str, *, lease: int, timeout: float) -> None:
        async def move(worker: WorkerProcess) -> None:
            pids = worker.suspended or [p for p in worker.pids() if uses_gpu(p)]
            if not pids:
                why = f"no process of the {worker.spec.kind} uses a GPU"
                # A job serves before its program has loaded.
                raise CannotSleep(why) if worker.spec.kind == "job" else SuspendFailed(why)
            await self.suspender.suspend(pids, timeout=timeout)
            worker.suspended = pids

        await self._switch(worker_id, lease, move)

    async def resume(self, worker_id: str, *, lease: int, timeout: float) -> None:
        async def move(worker: WorkerProcess) -> None:
            await self.suspender.resume(worker.suspended, timeout=timeout)
            worker.suspended = []

        await self._switch(worker_id, lease, move)

    async def _switch(
        self, worker_id: str, lease: int, move: Callable[[WorkerProcess], Awaitable[None]]
    ) -> None:
        """Suspend or resume a worker, even if the caller goes away. Later callers wait."""
        worker = self._workers.get(worker_id)
        if worker is None:
            raise SuspendFailed(f"worker {worker_id} does not run")
        await asyncio.shield(_begin(self._carry_out(worker, lease, move), self._calls))

    async def _carry_out(
        self, worker: WorkerProcess, lease: int, move: Callable[[WorkerProcess], Awaitable[None]]
    ) -> None:
        async with worker.switching:
            if lease < worker.lease:
                raise IllegalTransition(
                    f"the lease {lease} came after {worker.lease}, which is newer"
                )
            if worker.ended.done():
                raise SuspendFailed(f"the {worker.spec.kind} has ended")
            worker.lease = lease
            await move(worker)
        self._log.info(
            "worker_suspended" if worker.suspended else "worker_resumed",
            worker_id=worker.spec.worker_id,
            processes=len(worker.suspended),
        )

    def ids(self) -> tuple[str, ...]:
        """Return all workers, also those without an address."""
        return tuple(self._workers)

    def told_ids(self) -> tuple[str, ...]:
        """Return the workers for which a new watcher gets the end, now or later."""
        return (*self.ids(), *(worker.spec.worker_id for worker in self._ended))

    async def list(self) -> list[WorkerHandle]:
        async with self._spawning:  # waits for a worker that is being spawned
            workers = tuple(self._workers.values())
        ending = [worker for worker in workers if worker.expected or worker.handle is None]
        await asyncio.gather(*(worker.kill() for worker in ending))
        running = [worker for worker in workers if worker not in ending]
        return [worker.handle for worker in running if worker.handle is not None]

    def watch(self) -> AsyncIterator[WorkerExit]:
        return self._watchers.watch_exits(map(_exit_of, self._ended))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        async with self._spawning:  # waits for a worker that is being spawned
            workers = tuple(self._workers.values())
        ends = (self.idle.close(), *(worker.stop_worker() for worker in workers))
        faults = await asyncio.gather(*ends, return_exceptions=True)
        for call in self._calls:  # such as a hanging suspension, whose program would go on
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for fault in faults:
            if fault is not None:
                raise fault
        self._watchers.close()  # last: watchers take this for the end of all workers
        if self._looking is not None:
            self._looking.cancel()
        await asyncio.gather(*self._removals, return_exceptions=True)
        await asyncio.to_thread(self.scratches.remove_all)

    async def _spawn(self, spec: WorkerSpec) -> WorkerProcess:
        """Raises `OSError` if the log or the program cannot be opened."""
        self.look_after_scratch()
        deadline = asyncio.get_running_loop().time() + spec.start_timeout
        assert is_name(spec.worker_id), spec.worker_id  # it names a file
        line = spec.model_dump_json().encode() + b"\n"
        if len(line) > MAX_SPEC_BYTES:
            raise WorkerStartFailed(
                f"the specification of {spec.worker_id} has {len(line)} bytes; at most "
                f"{MAX_SPEC_BYTES} are allowed"
            )
        log_path = self._logs / f"{spec.worker_id}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_fd = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            with suppress(OSError):  # a full disk costs log lines, not workers
                append_line(log_fd, _first_line(spec))
            log_start = os.fstat(log_fd).st_size
            child = None
            if _may_be_pooled(spec):
                child = await self.idle.take_process(spec.kind, line=line, log_fd=log_fd)
            if child is None:
                child = await start_child(
                    self.command(spec.kind), line=line, output=log_fd, scratches=self.scratches
                )
        finally:
            os.close(log_fd)
        try:
            self.groups.record_group(child.pid)
        except OSError:
            child.kill()
            raise
        return WorkerProcess(
            spec=spec,
            process=child.process,
            lifeline_fd=child.lifeline_fd,
            report_fd=child.report_fd,
            deadline=deadline,
            advertised="" if spec.host == LOOPBACK else self.advertised,
            log_path=log_path,
            log_start=log_start,
            scratch=child.scratch,
        )

    def look_after_scratch(self) -> None:
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="shared-memory")

    async def _look(self) -> None:
        while True:
            children: list[Child | WorkerProcess] = [*self.idle.children(), *self._workers.values()]
            known = [(each.pid, each.scratch) for each in children if each.scratch is not None]
            await asyncio.to_thread(self.scratches.look, known)  # reads large files of /proc
            await asyncio.sleep(_LOOK_SECONDS)

    def _kinds(self) -> Iterator[str]:
        return (worker.spec.kind for worker in tuple(self._workers.values()))

    def _quiet(self) -> bool:
        return not self._spawning.locked() and not any(
            worker.starts for worker in self._workers.values()
        )

    def _note_end(self, worker: WorkerProcess) -> None:
        self._forget(worker)
        if worker.scratch is not None:
            _begin(asyncio.to_thread(self.scratches.remove, worker.scratch), self._removals)
        self.groups.remove_group(worker.pid)  # last: a full disk may refuse it

    def _forget(self, worker: WorkerProcess) -> None:
        worker_id = worker.spec.worker_id
        del self._workers[worker_id]
        if worker.expected or worker.handle is None:  # its caller is told
            return
        self._ended.append(worker)
        exit_, about = _exit_of(worker), {"worker_id": worker_id, "pid": worker.pid}
        if worker.spec.kind == "job" and worker.process.returncode == 0:
            self._log.info("job_ended", **about)
        else:
            self.metrics.worker_exits.labels(worker.spec.kind).inc()
            self._log.error("worker_ended", **about, reason=exit_.reason)
        self._watchers.tell(exit_)


def _begin(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    """Begin work as one of `tasks`, which holds it until it ends."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def _may_be_pooled(spec: WorkerSpec) -> bool:
    """Return whether an idle process has the right imports in the right order for this worker."""
    return spec.trainer is None or spec.trainer.backend == _PRELOADED_BACKEND


def _exit_of(worker: WorkerProcess) -> WorkerExit:
    return WorkerExit(
        worker_id=worker.spec.worker_id, reason=worker.ended.result(), crashed=worker.crashed
    )


def _first_line(spec: WorkerSpec) -> bytes:
    """Return the log's first line, which identifies the worker later."""
    about = {
        "event": "log_of_worker",
        "level": "info",
        "timestamp": datetime.now(UTC).isoformat(),
        "service": spec.kind,
        "worker_id": spec.worker_id,
        "session_id": spec.session_id,
        "run_id": spec.run_id,
        "model": spec.model_name,
    }
    return orjson.dumps(about) + b"\n"
