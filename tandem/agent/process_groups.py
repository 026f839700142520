"""The process groups of an agent's workers, in a file for the next agent.

When an agent is killed, the lifelines kill its workers. A killed process may need seconds to free a
device's memory, or hang in the kernel. So the next agent serves only after all these groups are
gone: then an unknown worker is certainly gone."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path

from tandem.agent.process_identity import namespace, process_start
from tandem.agent.worker_process import group_members, kill_group
from tandem.errors import WorkerStartFailed
from tandem.telemetry import get_log

FILE_NAME = "agent.groups"

_LINE_BYTES = 80
_LINES = 64
"""The initial room of the file, so that a full disk prevents no start."""
_PATIENCE = 60.0
_POLL_SECONDS = 0.05
_GROUP = re.compile(r"(\d+) (\S.*?) *", re.ASCII)


class ProcessGroups:
    """One agent's groups, listed in the file `path`: each has a line, which also identifies its
    first process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[int] = []

    async def end_earlier(self) -> None:
        """Kill the remains of an earlier agent's workers, and wait for their end.

        Raises `WorkerStartFailed` if a process stays."""
        earlier, size = self._read()
        deadline = time.monotonic() + _PATIENCE
        while left := [pgid for pgid, since in earlier.items() if _is_left(pgid, since)]:
            if time.monotonic() > deadline:
                raise WorkerStartFailed(
                    f"processes of an earlier agent's workers do not end: {_members(left)}"
                )
            for pgid in left:
                kill_group(pgid)
            await asyncio.sleep(_POLL_SECONDS)
        if earlier:
            get_log().info("earlier_workers_gone", groups=list(earlier))
        self._lines = [0] * max(_LINES, size)
        self._write(0, *[""] * len(self._lines))

    def record_group(self, pgid: int) -> None:
        """Raises `OSError`."""
        if 0 not in self._lines:
            self._lines.append(0)
        number = self._lines.index(0)
        self._write(number, f"{pgid} {process_start(pgid)}")
        self._lines[number] = pgid

    def remove_group(self, pgid: int) -> None:
        number = self._lines.index(pgid)
        self._lines[number] = 0
        self._write(number, "")

    def _read(self) -> tuple[dict[int, str], int]:
        """Return the groups, with the birth of each first process, and the number of lines.

        A torn line comes from a crashed machine, where all processes have ended."""
        if not self._path.exists():
            return {}, 0
        lines = self._path.read_text(errors="replace").splitlines()
        whole = [found.groups() for line in lines if (found := _GROUP.fullmatch(line))]
        return {int(pgid): since for pgid, since in whole}, len(lines)

    def _write(self, first: int, *texts: str) -> None:
        try:
            with self._path.open("r+b" if self._path.exists() else "w+b") as file:
                file.seek(first * _LINE_BYTES)
                file.write(b"".join(map(_line, texts)))
        except OSError as error:  # a full disk's error names no file
            raise OSError(error.errno, error.strerror, str(self._path)) from error


def _line(text: str) -> bytes:
    return text.encode().ljust(_LINE_BYTES - 1) + b"\n"


def _is_left(pgid: int, since: str) -> bool:
    """Return whether processes of this very group run.

    While a member runs, its number is not used again. If the first process has ended, only the
    session, which each worker leads, distinguishes it from a later program's group."""
    first = process_start(pgid)
    same = first in ("", since) and since.startswith(namespace())
    return same and any(_session(pid) == pgid for pid in group_members(pgid))


def _members(groups: list[int]) -> list[int]:
    return [pid for pgid in groups for pid in group_members(pgid)]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:  # it has just ended
        return 0
