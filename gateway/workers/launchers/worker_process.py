"""One worker process as the launcher sees it, from its first breath to its last."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from gateway.workers.launchers.base import WorkerHandle
from gateway.workers.launchers.groups import group_gone, group_members, kill_group
from gateway.workers.launchers.report import ReportReader
from tandem.errors import WorkerCrashed, WorkerStartFailed
from tandem.telemetry import get_log
from tandem.worker import WorkerReport, WorkerSpec

_TAIL_BYTES = 4096
_TAIL_LINES = 5
_GROUP_SECONDS = 10.0
"""How long killed processes may take to be gone. A GPU's memory is given back in that time."""


class WorkerProcess:
    """Supervises one process and its group until nothing of it is left.

    `failed` is done when it is known that the worker will never serve (again): it has said
    so, or it has ended. `ended` is done when nothing of it runs any more, with the reason.
    `expected` says that the end was asked for, `awaited` that somebody waits for readiness
    and so learns of the end.
    """

    def __init__(
        self,
        *,
        spec: WorkerSpec,
        process: asyncio.subprocess.Process,
        lifeline_fd: int,
        report_fd: int,
        log_path: Path,
        log_start: int,
        start_timeout: float,
        error_patience: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.pid = process.pid
        self.log_path = log_path
        self.handle: WorkerHandle | None = None
        self.expected = False
        self.awaited = False
        self.failed: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._process = process
        self._lifeline_fd = lifeline_fd
        self._log_start = log_start
        self._deadline = loop.time() + start_timeout
        self._error_patience = error_patience
        self._address: asyncio.Future[WorkerReport] = loop.create_future()
        self._error = ""
        self._log = get_log(worker_id=spec.worker_id, pid=process.pid)
        self._reports = ReportReader(
            fd=report_fd, worker_id=spec.worker_id, on_report=self._take_report
        )
        self._supervision = asyncio.create_task(self._supervise())

    def seconds_left(self) -> float:
        """Until the start timeout is over."""
        return self._deadline - asyncio.get_running_loop().time()

    async def reported(self, *, timeout: float) -> WorkerReport | None:
        """Where the worker listens; None when it has said nothing within `timeout` seconds.

        Raises `WorkerStartFailed` when it says that it cannot start, or ends.
        """
        either: set[asyncio.Future[Any]] = {self._address, self.failed}
        await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self.failed.done():
            raise self.start_failure()
        return self._address.result() if self._address.done() else None

    def start_failure(self) -> WorkerStartFailed:
        """Why it did not start. Only when `failed` is done."""
        if self.expected:
            return WorkerStartFailed(f"the {self.spec.kind} was stopped while it started")
        reason = self._error or self.ended.result()
        kind = WorkerCrashed if -(self._process.returncode or 0) in _CRASHES else WorkerStartFailed
        return kind(f"the {self.spec.kind} did not start: {reason}")

    async def stop(self, timeout: float) -> None:
        """Asks it to end, kills its group after `timeout` seconds, returns when it has ended."""
        self.expected = True
        if not await self._ask(timeout):
            self._log.warning("worker_killed", after_seconds=timeout)
        await self.kill(timeout)

    async def kill(self, timeout: float) -> None:
        """Kills its group; the end counts as expected. Returns when it has ended."""
        self.expected = True
        if not self.ended.done():
            kill_group(self.pid)
            await asyncio.wait({self.ended}, timeout=timeout + 2 * _GROUP_SECONDS)
        if not self.ended.done():  # stuck in the kernel; the supervision goes on waiting
            self._log.error("worker_not_gone", members=group_members(self.pid))

    async def _ask(self, timeout: float) -> bool:
        if self._process.returncode is None:
            try:
                self._process.terminate()
            except ProcessLookupError:  # it has just ended
                self._log.debug("worker_ended_before_stop")
        await asyncio.wait({self.ended}, timeout=timeout)
        return self.ended.done()

    def _take_report(self, report: WorkerReport) -> None:
        if report.error:
            self._error = self._error or report.error
            if not self.failed.done():
                self.failed.set_result(None)
        elif not self._address.done():
            self._address.set_result(report)

    async def _supervise(self) -> None:
        process_ended = asyncio.create_task(self._process.wait())
        either: set[asyncio.Future[Any]] = {process_ended, self.failed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not process_ended.done():  # it said that it failed, so it must end soon
            await asyncio.wait({process_ended}, timeout=self._error_patience)
            if not process_ended.done():
                kill_group(self.pid)
        status = await process_ended
        # The number cannot belong to another group yet while one process of ours is left in it.
        kill_group(self.pid)
        self._reports.drain()  # what it wrote last is in the pipe, even though it is dead
        self._reports.close()
        os.close(self._lifeline_fd)
        if not await group_gone(self.pid, timeout=_GROUP_SECONDS):
            self._log.error("worker_group_not_gone", members=group_members(self.pid))
        self.ended.set_result(self._error or self._describe(status))
        if not self.failed.done():
            self.failed.set_result(None)

    def _describe(self, status: int) -> str:
        if status < 0:
            return f"the {self.spec.kind} was killed by {_signal_name(-status)}"
        said = f"the {self.spec.kind} exited with status {status}"
        tail = self._log_tail()
        return f"{said}; the last lines of its log: {tail}" if tail else said

    def _log_tail(self) -> str:
        """The end of what this worker logged, on one line, without its secret."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _TAIL_BYTES))
                text = log.read(_TAIL_BYTES).decode(errors="replace")
        except OSError as error:
            return f"({error})"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-_TAIL_LINES:]).replace(self.spec.secret, "(secret)")


_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
