"""Workers as processes on this machine, each in a session and process group of its own."""

from __future__ import annotations

import asyncio
import os
import re
import select
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from gateway.workers.launchers.base import WorkerExit, WorkerHandle
from gateway.workers.launchers.health import serving
from gateway.workers.launchers.watch import Watchers
from gateway.workers.launchers.worker_process import WorkerProcess
from tandem.errors import WorkerStartFailed
from tandem.telemetry import get_log
from tandem.worker import WorkerSpec

_MODULES = {"trainer": "trainer_service", "sampler": "sampler_service"}
_NOT_FOR_WORKERS = re.compile(
    r"TANDEM_DATABASE_URL|PGPASSWORD"
    r"|.*(_KEY|_KEY_ID|_TOKEN|_SECRET|_PASSWORD|_PASSPHRASE|_CREDENTIALS)",
    re.IGNORECASE,
)
"""Variables that hold secrets, by their names: workers need none of anybody's."""
_MAX_SPEC_BYTES = 16 * select.PIPE_BUF  # what a pipe holds before anybody reads it


def default_command(spec: WorkerSpec) -> list[str]:
    """The service of the spec's kind, run by our own interpreter."""
    return [sys.executable, "-m", _MODULES[spec.kind]]


class ProcessLauncher:
    """Implements `Launcher`.

    `command` says what to run for a spec; `--report-fd N` is added to it. The specification,
    the secret included, goes over standard input, which then stays open as the worker's
    lifeline: whatever ends this process, the kernel closes the pipe, and the worker kills its
    group (`tandem.worker.hold_lifeline`). Standard output and error are appended to
    `data_dir/logs/WORKER.log`. Timeouts are in seconds.
    """

    def __init__(
        self,
        *,
        data_dir: Path,
        start_timeout: float,
        stop_timeout: float,
        command: Callable[[WorkerSpec], list[str]] = default_command,
    ) -> None:
        self._logs = data_dir / "logs"
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._command = command
        self._workers: dict[str, WorkerProcess] = {}
        self._watchers = Watchers()
        self._spawning = asyncio.Lock()
        self._closed = False
        self._log = get_log()

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        worker = await self._spawn(spec)
        try:
            report = await worker.reported(timeout=worker.seconds_left())
            if report is None:
                raise WorkerStartFailed(
                    f"the {spec.kind} did not report an address within "
                    f"{self._start_timeout:g} s; its log is {worker.log_path}"
                )
        except BaseException:  # a cancelled start leaves nothing behind either
            await worker.kill(self._stop_timeout)
            raise
        worker.handle = WorkerHandle(
            worker_id=spec.worker_id,
            kind=spec.kind,
            address=report.address,
            metrics_port=report.metrics_port,
            pid=worker.pid,
            log_path=worker.log_path,
            secret=spec.secret,
        )
        self._log.info(
            "worker_started",
            worker_id=spec.worker_id,
            pid=worker.pid,
            address=report.address,
            session_id=spec.session_id,
        )
        return worker.handle

    async def wait_ready(self, worker_id: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is None or worker.handle is None:
            raise WorkerStartFailed(f"worker {worker_id} does not run")
        handle = worker.handle
        worker.awaited = True
        check = asyncio.create_task(
            serving(
                address=handle.address, secret=handle.secret, timeout=max(0, worker.seconds_left())
            )
        )
        try:
            either: set[asyncio.Future[Any]] = {check, worker.failed}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if worker.failed.done():  # also one that ended just as it became ready
                raise worker.start_failure()
            if answer := check.result():
                raise WorkerStartFailed(
                    f"the {handle.kind} did not become ready ({answer}; it had "
                    f"{self._start_timeout:g} s to start); its log is {handle.log_path}"
                )
        except WorkerStartFailed:
            await worker.kill(self._stop_timeout)
            raise
        finally:
            worker.awaited = False
            check.cancel()

    async def stop(self, worker_id: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            await worker.stop(self._stop_timeout)

    def list(self) -> list[WorkerHandle]:
        return [worker.handle for worker in self._workers.values() if worker.handle is not None]

    def watch(self) -> AsyncIterator[WorkerExit]:
        return self._watchers.add()

    async def close(self) -> None:
        self._closed = True
        async with self._spawning:  # a worker that is being spawned is registered after this
            workers = tuple(self._workers.values())
        await asyncio.gather(*(worker.stop(self._stop_timeout) for worker in workers))
        self._watchers.close()

    async def _spawn(self, spec: WorkerSpec) -> WorkerProcess:
        """Starts the process and registers it, so that from here on `stop` finds it."""
        assert re.fullmatch(r"[\w.-]+", spec.worker_id), spec.worker_id  # it names a file
        line = spec.model_dump_json().encode() + b"\n"
        if len(line) > _MAX_SPEC_BYTES:
            raise WorkerStartFailed(
                f"the specification of {spec.worker_id} has {len(line)} bytes, "
                f"{_MAX_SPEC_BYTES} at most"
            )
        async with self._spawning:
            if self._closed:
                raise WorkerStartFailed("the launcher is closed")
            if spec.worker_id in self._workers:
                raise WorkerStartFailed(f"worker {spec.worker_id} runs already")
            try:
                worker = await self._run(spec, line)
            except OSError as error:
                raise WorkerStartFailed(f"the {spec.kind} could not be started: {error}") from error
            self._workers[spec.worker_id] = worker
            worker.ended.add_done_callback(lambda _: self._forget(spec.worker_id, worker))
            return worker

    async def _run(self, spec: WorkerSpec, line: bytes) -> WorkerProcess:
        """Raises `OSError` when the log cannot be opened or the program not be executed."""
        self._logs.mkdir(parents=True, exist_ok=True)
        log_path = self._logs / f"{spec.worker_id}.log"
        environment = {k: v for k, v in os.environ.items() if not _NOT_FOR_WORKERS.fullmatch(k)}
        # Python makes all of these uninheritable; only what is named below reaches the child,
        # so that no worker holds the lifeline of another one open.
        log_fd = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        log_start = os.fstat(log_fd).st_size
        spec_fd, lifeline_fd = os.pipe()
        report_fd, worker_report_fd = os.pipe()
        try:
            # Before the process exists: it fits into the pipe, and there is nobody to wait for.
            os.write(lifeline_fd, line)
            process = await asyncio.create_subprocess_exec(
                *self._command(spec),
                "--report-fd",
                str(worker_report_fd),
                stdin=spec_fd,
                stdout=log_fd,
                stderr=log_fd,
                pass_fds=(worker_report_fd,),
                start_new_session=True,
                env={**environment, "PYTHONUNBUFFERED": "1"},
            )
        except BaseException:
            os.close(lifeline_fd)
            os.close(report_fd)
            raise
        finally:
            os.close(log_fd)
            os.close(spec_fd)
            os.close(worker_report_fd)
        return WorkerProcess(
            spec=spec,
            process=process,
            lifeline_fd=lifeline_fd,
            report_fd=report_fd,
            log_path=log_path,
            log_start=log_start,
            start_timeout=self._start_timeout,
            error_patience=self._stop_timeout,
        )

    def _forget(self, worker_id: str, worker: WorkerProcess) -> None:
        del self._workers[worker_id]
        if worker.expected or worker.awaited or worker.handle is None:  # its caller knows
            return
        reason = worker.ended.result()
        self._log.error("worker_ended", worker_id=worker_id, pid=worker.pid, reason=reason)
        self._watchers.tell(WorkerExit(worker_id=worker_id, reason=reason))
