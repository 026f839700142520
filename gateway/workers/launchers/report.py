"""Reads what a worker writes to its report file descriptor, without blocking the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from pydantic import ValidationError

from tandem.telemetry import get_log
from tandem.worker import WorkerReport

_READ_BYTES = 65536
_MAX_LINE_BYTES = 2**20


class ReportReader:
    """Owns the reading end of a report pipe and hands over each report as it comes.

    Lines that are no report are logged and left out: a library that writes to the wrong
    descriptor must not decide whether a worker starts.
    """

    def __init__(
        self, *, fd: int, worker_id: str, on_report: Callable[[WorkerReport], None]
    ) -> None:
        self._fd = fd
        self._buffer = b""
        self._skipping = False
        self._open = True
        self._on_report = on_report
        self._log = get_log(worker_id=worker_id)
        os.set_blocking(fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self.drain)

    def drain(self) -> None:
        """Reads all that is in the pipe now."""
        while self._open:
            try:
                block = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not block:
                self.close()
                return
            self._feed(block)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            os.close(self._fd)

    def _feed(self, block: bytes) -> None:
        *lines, rest = (self._buffer + block).split(b"\n")
        for line in lines:
            if not self._skipping:
                self._take(line)
            self._skipping = False
        if len(rest) > _MAX_LINE_BYTES:  # garbage without an end must not fill our memory
            self._skipping, rest = True, b""
        self._buffer = rest

    def _take(self, line: bytes) -> None:
        try:
            report = WorkerReport.model_validate_json(line)
        except ValidationError:
            report = WorkerReport()
        if report.address or report.error:
            self._on_report(report)
        else:
            self._log.warning("worker_report_unreadable", line=line[:200].decode(errors="replace"))
