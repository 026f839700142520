"""Workers as processes on this machine, each the leader of its own session and process group.

`ProcessLauncher` starts them and speaks the handshake of `tandem.worker` over pipes.
`WorkerProcess` supervises one of them until nothing of its group is left.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import psutil
from pydantic import ValidationError

from gateway.workers.launchers.base import (
    WorkerDetails,
    WorkerExit,
    WorkerHandle,
    wait_until_serving,
)
from tandem.errors import WorkerCrashed, WorkerStartFailed, without_paths
from tandem.telemetry import get_log
from tandem.worker import WorkerReport, WorkerSpec

SECRET_VARIABLES = re.compile(
    r"TANDEM_DATABASE_URL|PGPASSWORD"
    r"|.*(_KEY|_KEY_ID|_TOKEN|_SECRET|_PASSWORD|_PASSPHRASE|_CREDENTIALS)",
    re.IGNORECASE,
)
"""Names of environment variables that hold secrets; workers inherit none of them."""

_MAX_SPEC_BYTES = 16 * select.PIPE_BUF  # the capacity of a pipe that nobody reads yet
_MAX_REPORT_BYTES = 2**20
_LAST_REPORT_SECONDS = 1.0
_GROUP_GONE_SECONDS = 10.0
"""How long killed processes may take to disappear; GPU memory is freed in that time."""
_POLL_SECONDS = 0.01
_TAIL_BYTES = 4096
_TAIL_LINES = 5
_NATIVE_CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
)

_NOT_RUNNING = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def default_command(spec: WorkerSpec) -> list[str]:
    """Return the command that runs the service of the spec's kind with this interpreter."""
    return [sys.executable, "-m", f"{spec.kind}_service"]


@dataclass(eq=False, kw_only=True)
class ProcessLauncher:
    """Implements `Launcher`.

    `command` says what to run for a spec; `--report-fd N` is added to it. Output is appended to
    `data_dir/logs/WORKER.log`. Timeouts are in seconds.
    """

    data_dir: Path
    start_timeout: float
    stop_timeout: float
    command: Callable[[WorkerSpec], list[str]] = default_command

    def __post_init__(self) -> None:
        self._workers: dict[str, WorkerProcess] = {}
        self._watchers: list[asyncio.Queue[WorkerExit | None]] = []
        self._spawning = asyncio.Lock()
        self._closed = False
        self._log = get_log()

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        async with self._spawning:
            if self._closed:
                raise WorkerStartFailed("the launcher is closed")
            if spec.worker_id in self._workers:
                raise WorkerStartFailed(f"worker {spec.worker_id} runs already")
            try:
                worker = await self._spawn(spec)
            except OSError as error:
                raise WorkerStartFailed(
                    f"the {spec.kind} could not be started: {without_paths(str(error))}"
                ) from error
            self._workers[spec.worker_id] = worker  # `stop` finds it from here on
            worker.ended.add_done_callback(lambda _: self._forget(worker))
        try:
            handle = await worker.reported()
        except BaseException:  # a cancelled start leaves nothing behind either
            await worker.kill()
            raise
        self._log.info(
            "worker_started",
            worker_id=spec.worker_id,
            pid=worker.pid,
            address=handle.address,
            session_id=spec.session_id,
        )
        return handle

    async def wait_ready(self, worker_id: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is None or worker.handle is None:
            raise WorkerStartFailed(f"worker {worker_id} does not run")
        worker.awaited = True
        try:
            await worker.serving(worker.handle)
        except WorkerStartFailed:
            await worker.kill()
            raise
        finally:
            worker.awaited = False

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            await (worker.kill() if at_once else worker.stop())

    def list(self) -> list[WorkerHandle]:
        return [worker.handle for worker in self._workers.values() if worker.handle is not None]

    def describe(self, worker_id: str) -> WorkerDetails:
        worker = self._workers.get(worker_id)
        if worker is None:
            return WorkerDetails()
        return WorkerDetails(pid=worker.pid, log_path=worker.log_path)

    def watch(self) -> AsyncIterator[WorkerExit]:
        queue: asyncio.Queue[WorkerExit | None] = asyncio.Queue()
        self._watchers.append(queue)
        if self._closed:
            queue.put_nowait(None)
        return _exits(queue)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        async with self._spawning:  # a worker that is being spawned is registered after this
            workers = tuple(self._workers.values())
        await asyncio.gather(*(worker.stop() for worker in workers))
        self._tell(None)

    async def _spawn(self, spec: WorkerSpec) -> WorkerProcess:
        """Raises `OSError` when the log cannot be opened or the program cannot be executed."""
        assert re.fullmatch(r"[\w.-]+", spec.worker_id), spec.worker_id  # it names a file
        line = spec.model_dump_json().encode() + b"\n"
        if len(line) > _MAX_SPEC_BYTES:
            raise WorkerStartFailed(
                f"the specification of {spec.worker_id} has {len(line)} bytes; at most "
                f"{_MAX_SPEC_BYTES} are allowed"
            )
        log_path = self.data_dir / "logs" / f"{spec.worker_id}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = {k: v for k, v in os.environ.items() if not SECRET_VARIABLES.fullmatch(k)}
        # Python makes all of these uninheritable; only those named below reach the child, so
        # that no worker holds the lifeline of another one open.
        log_fd = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with suppress(OSError):  # a full disk costs log lines, not workers
            os.write(log_fd, _first_line(spec))
        log_start = os.fstat(log_fd).st_size
        spec_fd, lifeline_fd = os.pipe()
        report_fd, worker_report_fd = os.pipe()
        try:
            os.write(lifeline_fd, line)  # fits into the empty pipe, so it never blocks
            process = await asyncio.create_subprocess_exec(
                *self.command(spec),
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
            for fd in (log_fd, spec_fd, worker_report_fd):
                os.close(fd)
        return WorkerProcess(
            spec=spec,
            process=process,
            lifeline_fd=lifeline_fd,
            report_fd=report_fd,
            log_path=log_path,
            log_start=log_start,
            start_timeout=self.start_timeout,
            stop_timeout=self.stop_timeout,
        )

    def _forget(self, worker: WorkerProcess) -> None:
        worker_id = worker.spec.worker_id
        del self._workers[worker_id]
        if worker.expected or worker.awaited or worker.handle is None:  # its caller is told
            return
        reason = worker.ended.result()
        self._log.error("worker_ended", worker_id=worker_id, pid=worker.pid, reason=reason)
        self._tell(WorkerExit(worker_id=worker_id, reason=reason))

    def _tell(self, exit_: WorkerExit | None) -> None:
        for queue in self._watchers:
            queue.put_nowait(exit_)


async def _exits(queue: asyncio.Queue[WorkerExit | None]) -> AsyncIterator[WorkerExit]:
    """Yield what comes through the queue until `None`."""
    while (exit_ := await queue.get()) is not None:
        yield exit_


@dataclass(eq=False, kw_only=True)
class WorkerProcess:
    """Supervises one process and its group until nothing of it is left.

    `failed` completes when the worker will never serve (again): it has reported an error, or
    ended. `ended` completes, with the reason, when nothing of it runs any more. `expected`: its
    end was requested. `awaited`: somebody waits for its readiness and so learns of its end.
    `deadline`: when it must be ready, in the time of the event loop.
    """

    spec: WorkerSpec
    process: asyncio.subprocess.Process
    lifeline_fd: int
    report_fd: int
    log_path: Path
    log_start: int
    start_timeout: float
    stop_timeout: float
    handle: WorkerHandle | None = None
    expected: bool = False
    awaited: bool = False

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.pid = self.process.pid
        self.deadline = loop.time() + self.start_timeout
        self.failed: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._address: asyncio.Future[WorkerReport] = loop.create_future()
        self._error = ""
        self._log = get_log(worker_id=self.spec.worker_id, pid=self.pid)
        self._reading = asyncio.create_task(self._read_reports())
        self._supervision = asyncio.create_task(self._supervise())

    async def reported(self) -> WorkerHandle:
        """Return where the worker listens.

        Raises `WorkerStartFailed` when it reports an error, ends, or is silent for too long.
        """
        await self._wait_for(self._address, timeout=self._seconds_left())
        if not self._address.done():
            raise WorkerStartFailed(
                f"the {self.spec.kind} did not report an address within "
                f"{self.start_timeout:g} s; its log is {self.log_path.name}"
            )
        report = self._address.result()
        self.handle = WorkerHandle(
            worker_id=self.spec.worker_id,
            kind=self.spec.kind,
            address=report.address,
            metrics_port=report.metrics_port,
            secret=self.spec.secret,
        )
        return self.handle

    async def serving(self, handle: WorkerHandle) -> None:
        """Return when its health service says so. Raises `WorkerStartFailed`, as `reported`."""
        check = asyncio.create_task(
            wait_until_serving(
                address=handle.address, secret=handle.secret, timeout=self._seconds_left()
            )
        )
        try:
            await self._wait_for(check)
            if answer := check.result():
                raise WorkerStartFailed(
                    f"the {handle.kind} did not become ready ({answer}; it had "
                    f"{self.start_timeout:g} s to start); its log is {self.log_path.name}"
                )
        finally:
            check.cancel()

    async def stop(self) -> None:
        """Ask it to end, kill its group after the stop timeout, return when it has ended."""
        self.expected = True
        with suppress(ProcessLookupError):  # it has ended
            self.process.terminate()
        await asyncio.wait({self.ended}, timeout=self.stop_timeout)
        if not self.ended.done():
            self._log.warning("worker_killed", after_seconds=self.stop_timeout)
        await self.kill()

    async def kill(self) -> None:
        """Kill its group and return when it has ended; the end counts as expected."""
        self.expected = True
        if not self.ended.done():
            kill_group(self.pid)
            await asyncio.wait({self.ended}, timeout=self.stop_timeout + 2 * _GROUP_GONE_SECONDS)
        if not self.ended.done():  # stuck in the kernel; the supervision goes on waiting
            self._log.error("worker_not_gone", members=group_members(self.pid))

    def _seconds_left(self) -> float:
        return max(0.0, self.deadline - asyncio.get_running_loop().time())

    async def _wait_for(self, step: asyncio.Future[Any], *, timeout: float | None = None) -> None:
        """Return when the step is done, or after `timeout` seconds. Raises `WorkerStartFailed`
        when the worker has failed, even if the step was done just before."""
        await _first_of(step, self.failed, timeout=timeout)
        if not self.failed.done():
            return
        if self.expected:
            raise WorkerStartFailed(f"the {self.spec.kind} was stopped while it started")
        crashed = -(self.process.returncode or 0) in _NATIVE_CRASHES
        kind = WorkerCrashed if crashed else WorkerStartFailed
        raise kind(f"the {self.spec.kind} did not start: {self._error or self.ended.result()}")

    async def _read_reports(self) -> None:
        """Take each line that the worker reports until it closes its end of the pipe.

        Lines that are no report are logged and skipped: a library that writes to the wrong
        descriptor must not decide whether a worker starts.
        """
        reader = asyncio.StreamReader(limit=_MAX_REPORT_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader),
            os.fdopen(self.report_fd, "rb", buffering=0),
        )
        try:
            while True:
                try:
                    line = await reader.readline()
                except ValueError:  # longer than the limit; the reader has discarded it
                    line = b"(too long)"
                if not line:
                    return
                self._take_report(line)
        finally:
            transport.close()

    def _take_report(self, line: bytes) -> None:
        try:
            report = WorkerReport.model_validate_json(line)
        except ValidationError:
            report = WorkerReport()
        if report.error:
            self._error = self._error or without_paths(report.error)
            if not self.failed.done():
                self.failed.set_result(None)
        elif not report.address:
            self._log.warning("worker_report_unreadable", line=line[:200].decode(errors="replace"))
        elif not self._address.done():
            self._address.set_result(report)

    async def _supervise(self) -> None:
        """Follow the process, and then its group, to their end."""
        exited = asyncio.create_task(self.process.wait())
        await _first_of(exited, self.failed)
        await asyncio.wait({exited}, timeout=self.stop_timeout)  # it has reported an error
        # The number cannot belong to another group while one process of this one is left.
        kill_group(self.pid)
        status = await exited
        os.close(self.lifeline_fd)
        # Its last report is in the pipe, whose other end closes with the last process.
        await asyncio.wait({self._reading}, timeout=_LAST_REPORT_SECONDS)
        self._reading.cancel()
        deadline = time.monotonic() + _GROUP_GONE_SECONDS
        while members := group_members(self.pid):
            if time.monotonic() > deadline:
                self._log.error("worker_group_not_gone", members=members)
                break
            await asyncio.sleep(_POLL_SECONDS)
        self.ended.set_result(self._error or self._describe_exit(status))
        if not self.failed.done():
            self.failed.set_result(None)

    def _describe_exit(self, status: int) -> str:
        """Return a sentence with the end of what it logged, on one line, without its secret."""
        if status < 0:
            name = next((s.name for s in signal.Signals if s == -status), f"signal {-status}")
            return f"the {self.spec.kind} was killed by {name}"
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                start = self.log_start if self.log_start <= size else 0  # it may have been rotated
                log.seek(max(start, size - _TAIL_BYTES))
                text = log.read(_TAIL_BYTES).decode(errors="replace")
        except OSError as error:
            text = f"({error})"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        tail = " | ".join(lines[-_TAIL_LINES:]).replace(self.spec.secret, "(secret)")
        sentence = f"the {self.spec.kind} exited with status {status}"
        return f"{sentence}; the last lines of its log: {without_paths(tail)}" if tail else sentence


def _first_line(spec: WorkerSpec) -> bytes:
    """Return the line that says what a log is the log of, also when the worker is forgotten."""
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


async def _first_of(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Return when one of them is done, or after `timeout` seconds; cancel none of them."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def kill_group(pgid: int) -> None:
    """Kill every process of the group; do nothing when there is none."""
    with suppress(ProcessLookupError, PermissionError):  # macOS answers the latter for zombies
        os.killpg(pgid, signal.SIGKILL)


def group_members(pgid: int) -> list[int]:
    """Return the pids of the group's running processes; zombies hold nothing and are left out."""
    try:
        os.killpg(pgid, 0)  # much cheaper than looking at every process
    except (ProcessLookupError, PermissionError):
        return []
    members = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):  # it has ended
            if os.getpgid(pid) == pgid and psutil.Process(pid).status() not in _NOT_RUNNING:
                members.append(pid)
    return members
