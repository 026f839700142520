"""Finds processes by a mark in their environment, reads their cores, and fills small disks.

`end_at_signal` lets a program clean up when it is asked to end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    group: int
    command: str

    @property
    def resident_bytes(self) -> int:
        """Private memory, without mapped files."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"process {self.pid} has no memory")


def marked(mark: str) -> list[Process]:
    """Return the running processes that started with `mark` in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if mark.encode() not in (folder / "environ").read_bytes():
                continue
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended, or is not ours
            continue
        if stat[0] not in "ZX":
            parent, group = int(stat[1]), int(stat[2])
            found.append(Process(int(folder.name), parent, group, command))
    return found


def group_of(leader: int, *, mark: str) -> list[Process]:
    """Return the processes of a worker by its group leader."""
    return [process for process in marked(mark) if process.group == leader]


def cores_of(pid: int) -> set[int]:
    """Return the cores of all threads."""
    cores: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # the thread has ended
            cores |= os.sched_getaffinity(int(task.name))
    return cores


def end_at_signal() -> None:
    """Let `finally` blocks run when this process is asked to end. `nohup` stays as it is."""

    def end(_signal: int, _frame: object) -> None:
        for each in asking:
            signal.signal(each, lambda *_: None)  # it is ending already
        raise KeyboardInterrupt

    given = (signal.SIGTERM, signal.SIGHUP)
    asking = [each for each in given if signal.getsignal(each) is signal.SIG_DFL]
    for each in asking:
        signal.signal(each, end)


@contextmanager
def small_disk(folder: Path, *, megabytes: int) -> Iterator[bool]:
    """Yields False if this user may not mount."""
    folder.mkdir(parents=True)
    size = f"size={megabytes}m"
    mounted = (
        os.geteuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", size, "tandem-test", str(folder)], capture_output=True
        ).returncode
        == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            return
