"""Looking at processes through /proc, found by a mark in the environment that they inherit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    pid: int
    group: int
    command: str

    @property
    def resident_bytes(self) -> int:
        """Memory that is its own; pages of files that are mapped do not count."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"process {self.pid} has no memory")


def marked(mark: str) -> list[Process]:
    """All running processes whose environment, at their start, held `mark`."""
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
            found.append(Process(pid=int(folder.name), group=int(stat[2]), command=command))
    return found


def group_of(leader: int, *, mark: str) -> list[Process]:
    """The processes of a worker, whose first process leads their group."""
    return [process for process in marked(mark) if process.group == leader]
