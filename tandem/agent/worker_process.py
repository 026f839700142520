"""A worker as a process on this machine, the leader of its own session and process group."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from tandem.agent.exits import end_of_log, killed_by
from tandem.errors import WorkerCrashed, WorkerMayRun, WorkerStartFailed, describe, without_paths
from tandem.protocol.worker import WorkerHandle, WorkerReport, WorkerSpec
from tandem.protocol.worker_health import wait_until_serving
from tandem.telemetry import get_log

_MAX_REPORT_BYTES = 2**20
_LAST_REPORT_SECONDS = 1.0
_GROUP_GONE_SECONDS = 10.0
"""Time for killed processes to disappear before a report. GPU memory is freed meanwhile."""
_POLL_SECONDS = 0.01
_LONG_POLL_SECONDS = 1.0
_TAIL_BYTES = 4096
_TAIL_LINES = 5
_NATIVE_CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
)
_TEMPORARY = b"TMPDIR="
_NOT_RUNNING = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


@dataclass(eq=False, kw_only=True)
class WorkerProcess:
    """Supervises one process and its group until nothing of it is left.

    - `failed`: completes when the worker will never serve (again).
    - `ended`: completes, with the reason, when nothing of the worker runs.
    - `ready`: it serves. `expected`: its end was requested.
    - `lease`: the newest fencing token of a suspend or resume. `suspended`: the suspended
      processes.
    - `deadline`: when it must have its address, in the event loop's time.
    - `scratch`: its temporary folder. `advertised`: this host's name for other hosts, if they can
      reach the worker."""

    spec: WorkerSpec
    process: asyncio.subprocess.Process
    lifeline_fd: int
    report_fd: int
    log_path: Path
    log_start: int
    deadline: float
    advertised: str = ""
    scratch: Path | None = None
    handle: WorkerHandle | None = None
    ready: bool = False
    expected: bool = False
    lease: int = 0
    suspended: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.pid = self.process.pid
        self.switching = asyncio.Lock()
        self.failed: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._address: asyncio.Future[WorkerReport] = loop.create_future()
        self._error = ""
        self._log = get_log(worker_id=self.spec.worker_id, pid=self.pid)
        self._reading = asyncio.create_task(self._read_reports())
        self._supervision = asyncio.create_task(self._supervise())

    @property
    def starts(self) -> bool:
        """Whether it is starting and has time left."""
        return not self.ready and not self.failed.done() and self._seconds_left() > 0

    @property
    def crashed(self) -> bool:
        """Whether a fault in native code ended it."""
        return -(self.process.returncode or 0) in _NATIVE_CRASHES

    async def reported(self) -> WorkerHandle:
        """Wait for its address. Raises `WorkerStartFailed` if it reports an error, ends, or is
        silent for too long."""
        await _first_of(self._address, self.failed, timeout=self._seconds_left())
        if self.failed.done():  # even if it reported just before
            if self.expected:
                raise WorkerStartFailed(f"the {self.spec.kind} was stopped while it started")
            kind = WorkerCrashed if self.crashed else WorkerStartFailed
            raise kind(f"the {self.spec.kind} did not start: {self._error or self.ended.result()}")
        if not self._address.done():
            raise WorkerStartFailed(
                f"the {self.spec.kind} did not report an address within "
                f"{self.spec.start_timeout:g} s; its log is {self.log_path.name}"
            )
        report = self._address.result()
        address = report.address
        if self.advertised:
            address = f"{self.advertised}:{address.rpartition(':')[2]}"
        self.handle = WorkerHandle.of(
            self.spec,
            address=address,
            metrics_port=report.metrics_port,
            pid=self.pid,
            log_path=str(self.log_path),
        )
        self._readiness = asyncio.create_task(self._note_ready(self.handle))
        self.failed.add_done_callback(lambda _: self._readiness.cancel())
        return self.handle

    async def _note_ready(self, handle: WorkerHandle) -> None:
        self.ready = not await wait_until_serving(handle, timeout=self._seconds_left())

    async def stop_worker(self) -> None:
        """Ask it to end, and kill its group after the stop timeout. A suspended worker could not
        end, so it is killed at once. See `kill`."""
        self.expected = True
        if not self.suspended:
            with suppress(ProcessLookupError):  # it has ended
                self.process.terminate()
            await asyncio.wait({self.ended}, timeout=self.spec.stop_timeout)
            if not self.ended.done():
                self._log.warning("worker_killed", after_seconds=self.spec.stop_timeout)
        await self.kill()

    async def kill(self) -> None:
        """Kill its group, and return when nothing of it is left. The end counts as expected.

        Raises `WorkerMayRun` if a process hangs in the kernel. The supervision continues to wait.
        """
        self.expected = True
        if not self.ended.done():
            kill_group(self.pid)
            await asyncio.wait(
                {self.ended}, timeout=self.spec.stop_timeout + 2 * _GROUP_GONE_SECONDS
            )
        if not self.ended.done():
            self._log.error("worker_not_gone", members=group_members(self.pid))
            raise WorkerMayRun(
                f"the {self.spec.kind} was killed, and some of its processes have not ended yet"
            )

    def _seconds_left(self) -> float:
        return max(0.0, self.deadline - asyncio.get_running_loop().time())

    async def _read_reports(self) -> None:
        """Read the worker's reports until the pipe closes.

        Other lines are logged and skipped: libraries may write to the wrong descriptor."""
        reader = asyncio.StreamReader(limit=_MAX_REPORT_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader),
            os.fdopen(self.report_fd, "rb", buffering=0),
        )
        try:
            while True:
                try:
                    line = await reader.readline()
                except ValueError:  # the reader has discarded a line above the limit
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
        exited = asyncio.create_task(self.process.wait())
        await _first_of(exited, self.failed)
        await asyncio.wait({exited}, timeout=self.spec.stop_timeout)  # it has reported an error
        # The number cannot belong to another group while a process of this one is left.
        kill_group(self.pid)
        status = await exited
        os.close(self.lifeline_fd)
        # Its last report is in the pipe, which closes with the last process.
        await asyncio.wait({self._reading}, timeout=_LAST_REPORT_SECONDS)
        self._reading.cancel()
        deadline = time.monotonic() + _GROUP_GONE_SECONDS
        while members := self._kill_strays() + group_members(self.pid):
            if time.monotonic() > deadline:
                self._log.error("worker_group_not_gone", members=members)
                deadline = math.inf
            await asyncio.sleep(_POLL_SECONDS if deadline < math.inf else _LONG_POLL_SECONDS)
        self.ended.set_result(self._error or self._describe_exit(status))
        if not self.failed.done():
            self.failed.set_result(None)

    def pids(self) -> list[int]:
        """Return its running processes, with those that a job started in other sessions."""
        return sorted({*group_members(self.pid), *self._of_job()})

    def _of_job(self) -> list[int]:
        """Return the processes of a job, also in sessions of their own."""
        if self.spec.kind != "job" or self.scratch is None:
            return []
        return [pid for pid, folder in temporary_folders() if folder == self.scratch]

    def _kill_strays(self) -> list[int]:
        """Kill the processes that a job started in sessions of their own, and return them."""
        strays = self._of_job()
        for pid in strays:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return strays

    def _describe_exit(self, status: int) -> str:
        """Return the exit in words, with the end of its log on one line, without its secret."""
        if status < 0:
            return f"the {self.spec.kind} was killed by {killed_by(status)}"
        try:
            text = end_of_log(self.log_path, start=self.log_start, most=_TAIL_BYTES)
        except OSError as error:
            text = f"({describe(error)})"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        tail = " | ".join(lines[-_TAIL_LINES:]).replace(self.spec.secret, "(secret)")
        sentence = f"the {self.spec.kind} exited with status {status}"
        return f"{sentence}; the last lines of its log: {without_paths(tail)}" if tail else sentence


async def _first_of(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def kill_group(pgid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pgid, signal.SIGKILL)


def group_members(pgid: int) -> list[int]:
    """Return the pids of the group's running processes, without zombies."""
    try:
        os.killpg(pgid, 0)  # much cheaper than a look at every process
    except (ProcessLookupError, PermissionError):
        return []
    members = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):  # it has ended
            if os.getpgid(pid) == pgid and psutil.Process(pid).status() not in _NOT_RUNNING:
                members.append(pid)
    return members


def temporary_folders() -> Iterator[tuple[int, Path]]:
    """Yield the running processes of this user with their temporary folders.

    A worker's processes inherit its folder, which no other worker has."""
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended, or belongs to somebody else
            for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if variable.startswith(_TEMPORARY):
                    yield pid, Path(os.fsdecode(variable.removeprefix(_TEMPORARY)))
