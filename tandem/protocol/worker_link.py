"""How it travels what launcher and worker tell each other: by a `LauncherLink`, which the worker
gets from `launcher_link`, and which is all that it knows of its launcher.

`PipeLink` is for a worker that is a child process: the specification is the first line of standard
input, which then stays open as the lifeline, and reports go to the descriptor `--report-fd`.
`PooledLink` is for a child process that was started before there was a worker for it to be
(`tandem/agent/pool.py`). `FileLink` is for a worker that is a container, whose launcher is not
there: the specification is the file `--spec-file`, of a mounted Secret, and the reason of its end
is left in `--report-file`, which Kubernetes calls the termination message.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from pydantic import BaseModel, ConfigDict

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
"""Characters of an error in a file: Kubernetes keeps 4096 bytes."""


class LauncherLink(Protocol):
    """A worker's connection to its launcher."""

    def preload(self, imports: Callable[[], None]) -> None:
        """Do what every worker of this kind does first, if there is no specification yet. Call
        first."""
        ...

    def read_spec(self) -> WorkerSpec:
        """Return the specification. Call once, after `preload`."""
        ...

    def hold_lifeline(self) -> None:
        """Kill the worker's process group once the launcher is gone. Call before slow imports."""
        ...

    def report(self, report: WorkerReport) -> None:
        """Send a report. Raises `OSError` when the launcher no longer reads."""
        ...


def launcher_link(arguments: Sequence[str] | None = None) -> LauncherLink:
    """Return the link that the command line chooses. `--report-fd N` is a `PipeLink`, with
    `--spec-fd M` a `PooledLink`, which imports with the niceness of `--nice`. `--spec-file PATH`
    and `--report-file PATH` are a `FileLink`. An unknown setting ends the process with status 2,
    and its launcher gets the reason."""
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
        link.report(WorkerReport(error_type=error.type, error=error.message))
        print(error.message, file=sys.stderr)
        raise SystemExit(2) from None
    return link


class PipeLink:
    """Implements `LauncherLink` for a child process; `stdin` is the standard input by default."""

    def __init__(self, *, report_fd: int, stdin: BinaryIO | None = None) -> None:
        self._report_fd = report_fd
        self._stdin = stdin if stdin is not None else sys.stdin.buffer

    def preload(self, imports: Callable[[], None]) -> None:
        """Its specification is there: what is to be imported is so when it is known where."""

    def read_spec(self) -> WorkerSpec:
        return _parse(self._stdin.readline(), self)

    def hold_lifeline(self) -> None:
        hold_lifeline(self._stdin.fileno())

    def report(self, report: WorkerReport) -> None:
        line = report.model_dump_json().encode() + b"\n"
        while line:  # a signal can cut a write to a pipe short
            line = line[os.write(self._report_fd, line) :]


class PooledLink(PipeLink):
    """Implements `LauncherLink` for a process that waits for a worker to be.

    Nothing but the end of the lifeline comes by standard input. The specification comes later, by a
    socket, together with the file that the worker's output goes to. A byte the other way says
    that the process is idle, and another one that it has become the worker.
    """

    def __init__(self, *, report_fd: int, spec: socket.socket, nice: int = 0) -> None:
        super().__init__(report_fd=report_fd)
        self._spec = spec
        self._nice = nice

    def preload(self, imports: Callable[[], None]) -> None:
        super().hold_lifeline()
        # A library asks at its import whether there is a GPU. Asked in the usual way, CUDA would
        # begin, and would not see later which devices are the worker's.
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
        """It is held since `preload`."""


class FileLink:
    """Implements `LauncherLink` for a container. `report` None: why it ends is in its log alone."""

    def __init__(self, *, spec: Path, report: Path | None = None) -> None:
        self._spec = spec
        self._report = report

    def preload(self, imports: Callable[[], None]) -> None:
        """Its specification is there, as for a `PipeLink`. No agent has set its limits."""
        set_process_limits()

    def read_spec(self) -> WorkerSpec:
        return _parse(self._spec.read_bytes(), self)

    def hold_lifeline(self) -> None:
        """It is the calls of gateways: `WorkerServer` holds it."""

    def report(self, report: WorkerReport) -> None:
        """Where it listens, its launcher knows."""
        if self._report is not None and report.error:
            short = report.model_copy(update={"error": report.error[:_LONGEST_REPORT]})
            self._report.write_text(short.model_dump_json())


class _Protocol(BaseModel):
    """What of a specification is understood first."""

    model_config = ConfigDict(hide_input_in_errors=True)
    protocol: int = PROTOCOL


def _parse(line: bytes, link: LauncherLink) -> WorkerSpec:
    """Return the specification. Of a gateway with another protocol nothing else is read: then the
    process ends, with the reason."""
    protocol = _Protocol.model_validate_json(line).protocol
    if protocol == PROTOCOL:
        return WorkerSpec.model_validate_json(line)
    reason = (
        f"this worker has Tandem {own_version()}, whose protocol is {PROTOCOL}, and that of its "
        f"gateway is {protocol}: the images of gateway and workers must be of one version"
    )
    link.report(WorkerReport(error_type=WorkerStartFailed.type, error=reason))
    raise SystemExit(reason)


def hold_lifeline(fd: int = 0) -> None:
    """Kill the whole process group once the other end of the pipe `fd` has closed.

    Covers the children that libraries start, too (vLLM's engine processes), which a parent-death
    signal on one process would leave behind. A process that does not lead its group, such as one
    started by hand in a script, ends alone.
    """
    leads = os.getpgrp() == os.getpid()
    if leads:
        _arm_kernel(fd)

    def wait() -> None:
        try:
            while os.read(fd, 4096):  # not sys.stdin: its lock gets in the way of a normal exit
                pass
        except OSError:  # a reset socket, a hung-up terminal: the launcher is gone all the same
            pass
        if leads:
            os.killpg(os.getpid(), signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _arm_kernel(fd: int) -> None:
    """Let the kernel itself kill the group when the pipe closes (Linux, see fcntl(2)).

    The thread of `hold_lifeline` needs the interpreter lock, which a native call may hold for
    long or, in a deadlock, for ever. The thread covers other systems, and a pipe that closed
    before this call, which causes no event.
    """
    if sys.platform != "linux":
        return
    f_setsig = 10
    try:
        fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fd, f_setsig, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:  # standard input is of a kind without such events: the thread is enough
        return
