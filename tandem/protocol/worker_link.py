"""The transport of the handshake: a worker's `LauncherLink`, its only knowledge of its launcher.

- `PipeLink`: for a child process. The first line of standard input is the specification. Then
  standard input stays open as the lifeline. Reports go to the descriptor `--report-fd`.
- `PooledLink`: for a process that was started before its worker existed (`tandem/agent/pool.py`).
- `FileLink`: for a container. The specification is `--spec-file`, from a mounted Secret. The reason
  of its end goes to `--report-file`, Kubernetes' termination message."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from tandem.errors import UnknownSetting, WorkerStartFailed
from tandem.protocol.background import in_background
from tandem.protocol.worker import (
    MAX_SPEC_BYTES,
    PROTOCOL,
    WorkerReport,
    WorkerSpec,
    own_version,
    set_process_limits,
)
from tandem.settings.variables import check_environment

_LONGEST_REPORT = 3000
"""In characters. Kubernetes keeps 4096 bytes."""


def launcher_link(arguments: Sequence[str] | None = None) -> LauncherLink:
    """Return the link for the command line.

    `--report-fd N` gives a `PipeLink`, with `--spec-fd M` a `PooledLink`, which imports with
    niceness `--nice`. `--spec-file PATH` and `--report-file PATH` give a `FileLink`. An unknown
    setting ends the process with status 2."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--report-fd", type=int, help="where reports are written")
    parser.add_argument("--spec-fd", type=int, help="a socket by which the specification will come")
    parser.add_argument("--nice", type=int, default=0, help="niceness of its imports")
    parser.add_argument("--spec-file", type=Path, help="the specification")
    parser.add_argument("--report-file", type=Path, help="where the reason of its end is left")
    chosen = parser.parse_args(arguments)
    link: LauncherLink
    if chosen.spec_file is not None:
        link = FileLink(spec=chosen.spec_file, report=chosen.report_file)
    elif chosen.report_fd is None:
        parser.error("--spec-file or --report-fd is needed")
    elif chosen.spec_fd is None:
        link = PipeLink(report_fd=chosen.report_fd)
    else:
        theirs = socket.socket(fileno=chosen.spec_fd)
        link = PooledLink(report_fd=chosen.report_fd, spec=theirs, nice=chosen.nice)
    try:
        check_environment(os.environ)
    except UnknownSetting as error:
        link.report(WorkerReport.of_error(error))
        print(error.message, file=sys.stderr)
        raise SystemExit(2) from None
    return link


class PipeLink:
    """The link of a child process. `stdin` defaults to standard input.

    Call `preload` first, with the imports to do now if there is no specification yet. Call
    `read_spec` once after it, and `hold_lifeline` before slow imports: it kills the worker's
    process group when the launcher is gone. `report` raises `OSError` if nobody reads it."""

    def __init__(self, *, report_fd: int, stdin: BinaryIO | None = None) -> None:
        self._report_fd = report_fd
        self._stdin = stdin if stdin is not None else sys.stdin.buffer

    def preload(self, imports: Callable[[], None]) -> None:
        """Do nothing: the specification is there, and the imports follow it."""

    def read_spec(self) -> WorkerSpec:
        return _parse(self._stdin.readline(), self)

    def hold_lifeline(self) -> None:
        hold_lifeline(self._stdin.fileno())

    def report(self, report: WorkerReport) -> None:
        line = report.model_dump_json().encode() + b"\n"
        while line:  # a signal can shorten a write to a pipe
            line = line[os.write(self._report_fd, line) :]


class PooledLink(PipeLink):
    """The link of a process that waits for its worker.

    Standard input is only the lifeline. The specification arrives later over a socket, with the
    file for the worker's output. The process sends one byte when it is idle, and one when it has
    become the worker."""

    def __init__(self, *, report_fd: int, spec: socket.socket, nice: int = 0) -> None:
        super().__init__(report_fd=report_fd)
        self._spec = spec
        self._nice = nice

    def preload(self, imports: Callable[[], None]) -> None:
        super().hold_lifeline()
        # Libraries check for a GPU at their import. The usual check would start CUDA, which then
        # ignores a later choice of devices.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        in_background(imports, nice=self._nice)
        self._spec.send(b".")

    def read_spec(self) -> WorkerSpec:
        line, descriptors = b"", list[int]()
        while not line.endswith(b"\n"):
            part, sent, *_ = socket.recv_fds(self._spec, MAX_SPEC_BYTES, 1)
            if not part:
                raise EOFError("the launcher has gone")
            line, descriptors = line + part, descriptors + sent
        for output in (1, 2):
            os.dup2(descriptors[0], output)
        os.close(descriptors[0])
        self._spec.send(b".")
        self._spec.close()
        return _parse(line, self)

    def hold_lifeline(self) -> None:
        """Do nothing: `preload` holds it."""


class FileLink:
    """The link of a container. Its methods are `PipeLink`'s.

    Without `report`, an error is only in the log."""

    def __init__(self, *, spec: Path, report: Path | None = None) -> None:
        self._spec = spec
        self._report = report

    def preload(self, imports: Callable[[], None]) -> None:
        """Set the process limits, because no agent has done so. The imports follow the
        specification."""
        set_process_limits()

    def read_spec(self) -> WorkerSpec:
        return _parse(self._spec.read_bytes(), self)

    def hold_lifeline(self) -> None:
        """Do nothing: the lifeline is the gateway's calls, and `WorkerServer` holds it."""

    def report(self, report: WorkerReport) -> None:
        """Write an error. The launcher knows the address already."""
        if self._report is not None and report.error:
            short = report.model_copy(update={"error": report.error[:_LONGEST_REPORT]})
            self._report.write_text(short.model_dump_json())


LauncherLink = PipeLink | FileLink
"""A worker's connection to its launcher."""


def _parse(line: bytes, link: LauncherLink) -> WorkerSpec:
    """Another protocol ends the process with a report."""
    protocol = json.loads(line).get("protocol", PROTOCOL)
    if protocol == PROTOCOL:
        return WorkerSpec.model_validate_json(line)
    reason = (
        f"this worker has Tandem {own_version()}, whose protocol is {PROTOCOL}, and that of its "
        f"gateway is {protocol}: the images of gateway and workers must be of one version"
    )
    link.report(WorkerReport.of_error(WorkerStartFailed(reason)))
    raise SystemExit(reason)


def hold_lifeline(fd: int = 0) -> None:
    """Kill the process group when the other end of the pipe `fd` closes.

    That includes libraries' children, such as vLLM's. A process that does not lead its group ends
    alone."""
    leads = os.getpgrp() == os.getpid()
    if leads:
        _arm_kernel(fd)

    def wait() -> None:
        try:
            while os.read(fd, 4096):  # not sys.stdin: its lock would block a normal exit
                pass
        except OSError:  # a reset socket or a closed terminal: the launcher is gone
            pass
        if leads:
            os.killpg(os.getpid(), signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _arm_kernel(fd: int) -> None:
    """Let the kernel kill the group when the pipe closes (fcntl(2)).

    The thread of `hold_lifeline` needs the interpreter lock, which a native call may hold for ever.
    It serves a pipe that closed before this call."""
    f_setsig = 10
    try:
        fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fd, f_setsig, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:  # this kind of input has no such events: the thread suffices
        return
