"""The process above sandboxed code: it sets limits, counts, and kills.

`sandbox` starts it with a JSON argument, as a program of its own that uses only the standard
library. It stops if the socket `control` closes, so nothing outlives the caller. It writes two
lines to the socket: the process `child` at its start, and `reason` and `exit_code` at the end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2): orphans become children of this process
POLL = 0.02
DISK_POLL = 0.2
LONGEST_KILL = 5.0


@dataclass(frozen=True)
class SandboxTask:
    """`outside` names the caller's process namespace. In another one, everything may be killed."""

    argv: list[str]
    folder: str
    control: int
    outside: str
    timeout: float
    memory_bytes: int
    disk_bytes: int
    processes: int

    @property
    def alone(self) -> bool:
        return "" != self.outside != process_namespace() != ""


def process_namespace() -> str:
    """Return the name of this process's namespace of processes, or "" where there are none."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def main() -> None:
    task = SandboxTask(**json.loads(sys.argv[1]))
    os.set_inheritable(task.control, False)
    control = socket.socket(fileno=task.control)
    with contextlib.suppress(OSError, AttributeError):  # not on macOS
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    waker, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = os.fork()
    if child == 0:
        become(task)
    control.sendall(json.dumps({"child": child}).encode() + b"\n")
    reason, code = watch(task, child, [task.control, waker])
    kill_all(task, child)
    with contextlib.suppress(OSError):  # the caller is gone
        control.sendall(json.dumps({"reason": reason, "exit_code": code}).encode() + b"\n")
    os._exit(0)


def become(task: SandboxTask) -> None:
    """Turn into the sandboxed program."""
    try:
        os.setsid()
        os.nice(10)  # the supervisor has the processor first
        cpu = int(task.timeout) + 1
        limits = {
            resource.RLIMIT_AS: task.memory_bytes,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_CPU: cpu,
            resource.RLIMIT_FSIZE: task.disk_bytes,
            resource.RLIMIT_NOFILE: 256,
        }
        others = 0 if task.alone else tasks_of_user()  # the limit counts all of the user's
        limits[resource.RLIMIT_NPROC] = others + task.processes + 8
        for limit, value in limits.items():
            _soft, hard = resource.getrlimit(limit)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            with contextlib.suppress(OSError, ValueError):  # macOS has no limit of memory
                resource.setrlimit(limit, (value, value))
        os.chdir(task.folder)
        os.execvp(task.argv[0], task.argv)
    except OSError as error:
        os.write(2, f"{task.argv[0]}: {error.strerror}\n".encode())
    os._exit(127)


def tasks_of_user() -> int:
    """Return the number of processes and threads of this user."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*/task"):
        with contextlib.suppress(OSError):
            found = folder.stat()
            count += found.st_nlink - 2 if found.st_uid == os.getuid() else 0
    return count


def watch(task: SandboxTask, child: int, wakers: list[int]) -> tuple[str, int]:
    """Wait for the end or the first broken limit. Return the reason and the exit code."""
    deadline = time.monotonic() + task.timeout
    disk_at = 0.0
    while True:
        ready, _, _ = select.select(wakers, [], [], POLL)
        if wakers[0] in ready:
            return "stopped", -1
        code = reap(child)
        if code is not None:
            return "exited", code
        now = time.monotonic()
        if now > deadline:
            return "timeout", -1
        found = [*islice(descendants(os.getpid()), task.processes + 1)]
        if len(found) > task.processes:
            return "processes", -1
        if sum(map(resident_bytes, found)) > task.memory_bytes:
            return "memory", -1
        if now > disk_at:
            disk_at = now + DISK_POLL
            if folder_bytes(task.folder) > task.disk_bytes:
                return "disk", -1


def reap(child: int) -> int | None:
    """Collect dead children, orphans included. Return the exit code of `child` if it is dead."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
    return code


def descendants(pid: int) -> Iterator[int]:
    """Yield the living processes below `pid`, parents first."""
    below: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            below += map(int, (thread / "children").read_text().split())
    for each in below:
        yield each
        yield from descendants(each)


def resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    return 0


def folder_bytes(folder: str) -> int:
    total = 0
    for root, _folders, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(f"{root}/{name}").st_blocks * 512
    return total


def kill_all(task: SandboxTask, child: int) -> None:
    """Kill all descendants, also those that left the process group."""
    if task.alone:
        with contextlib.suppress(OSError):
            os.kill(-1, signal.SIGKILL)  # at one moment: none can fork meanwhile
        return
    deadline = time.monotonic() + LONGEST_KILL
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)
        found = [*descendants(os.getpid())]
        for sign in (signal.SIGSTOP, signal.SIGKILL):  # a stopped process starts no other
            for pid in found:
                with contextlib.suppress(OSError):
                    os.kill(pid, sign)
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
