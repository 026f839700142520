"""Temporary files of workers: a folder for each, and names in /dev/shm.

OpenMP, torch and vLLM remove theirs only at a normal end. So each child of an agent has its own
folder, which also lists its processes' names in /dev/shm. It is removed after the child, or by the
next agent of the data directory."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from tandem.agent.worker_process import group_members, temporary_folders
from tandem.errors import WorkerStartFailed
from tandem.telemetry import get_log

_SHARED_MEMORY = Path("/dev/shm")
_NOTES, _PID = ".shared-memory", ".pid"
_NAME_WITH_PID = re.compile(r"(?:__KMP_REGISTERED_LIB_|torch_)(\d+)_.*", re.ASCII)
"""Names made by OpenMP and torch, with the process's number."""
_PATIENCE = 60.0
_POLL_SECONDS = 0.05
_LOOKS = 5
"""After that many looks without an owner among our processes, a name belongs to somebody else."""


class ScratchFolders:
    """The temporary folders of one agent's children. `data_dir` is the agent's."""

    def __init__(self, data_dir: Path, *, shared_memory: Path = _SHARED_MEMORY) -> None:
        # The path is short, because sockets in it have a limit, and the next agent can compute it.
        name = sha256(os.fsencode(data_dir.absolute())).hexdigest()[:8]
        self._root = Path(tempfile.gettempdir()) / f"tandem-{os.getuid()}-{name}"
        self._shared_memory = shared_memory
        self._looks: dict[str, int] = {}

    def make(self) -> Path | None:
        """Return a new folder, or None if there is no room: then the system's own must do."""
        try:
            self._root.mkdir(mode=0o700, exist_ok=True)
            if not self._is_ours():
                raise PermissionError(f"{self._root} belongs to somebody else")
            return Path(tempfile.mkdtemp(dir=self._root, prefix=""))
        except OSError as error:
            get_log().warning("no_temporary_folder", reason=str(error))
            return None

    def note_pid(self, folder: Path, pid: int) -> None:
        with suppress(OSError):  # no room: names are noted later or never
            (folder / _PID).write_text(str(pid))

    def look(self, children: Iterable[tuple[int, Path]]) -> None:
        """Note new names in /dev/shm. A child is a process group and its folder."""
        names = self._own_names()
        self._looks = {name: looks for name, looks in self._looks.items() if name in names}
        new = [name for name in names if self._looks.setdefault(name, 0) < _LOOKS]
        if not new:
            return
        for group, folder in children:
            made = set(new).intersection(self._names_of(group_members(group), new))
            for name in made:
                self._looks[name] = _LOOKS
                self._note(folder, name, names[name])
        for name in new:
            self._looks[name] += 1

    def remove(self, folder: Path) -> None:
        """Remove an ended child's folder, and its processes' names in /dev/shm.

        Includes names that its first process made after the last look."""
        notes, first = folder / _NOTES, folder / _PID
        noted = {f.name: f.read_text() for f in notes.iterdir()} if notes.is_dir() else {}
        pid = first.read_text() if first.is_file() else ""
        gone = pid != "" and not Path(f"/proc/{pid}").exists()
        for name, inode in self._own_names().items():
            if noted.get(name) == str(inode) or (gone and str(_pid_in(name)) == pid):
                with suppress(FileNotFoundError):
                    (self._shared_memory / name).unlink()
        shutil.rmtree(folder, ignore_errors=True)

    def end_strays(self) -> None:
        """Kill the processes that an earlier agent's jobs started in sessions of their own. Return
        when they are gone. Raises `WorkerStartFailed` if one stays."""
        deadline = time.monotonic() + _PATIENCE
        while strays := [pid for pid, folder in temporary_folders() if self._is_stray(pid, folder)]:
            if time.monotonic() > deadline:
                raise WorkerStartFailed(
                    f"processes of an earlier agent's jobs do not end: {strays}"
                )
            for pid in strays:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)

    def _is_stray(self, pid: int, folder: Path) -> bool:
        """Whether a process has the folder of a child, and another group than that child."""
        with suppress(OSError):  # it has ended
            if folder.parent == self._root:
                return (folder / _PID).read_text() != str(os.getpgid(pid))
        return False

    def remove_all(self) -> None:
        """Remove the remains of all children. Call it when no worker runs.

        An idle process of a killed agent may still import. It keeps its folder until the next call.
        """
        if self._is_ours():
            for folder in self._root.iterdir():
                first = folder / _PID
                pid = first.read_text() if first.is_file() else ""
                if not (pid.isdigit() and group_members(int(pid))):
                    self.remove(folder)
            with suppress(OSError):
                self._root.rmdir()

    def _is_ours(self) -> bool:
        """Return whether the agent's folder exists and only we can write into it.

        Its path can be guessed, and anybody may make folders beside it."""
        try:
            about = self._root.lstat()
        except FileNotFoundError:
            return False
        writable = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not writable

    def _own_names(self) -> dict[str, int]:
        """Return our user's names in /dev/shm, each with its inode."""
        found = {}
        with suppress(OSError), os.scandir(self._shared_memory) as entries:  # exists only on Linux
            for entry in entries:
                with suppress(FileNotFoundError):
                    about = entry.stat(follow_symlinks=False)
                    if about.st_uid == os.getuid() and stat.S_ISREG(about.st_mode):
                        found[entry.name] = about.st_ino
        return found

    def _names_of(self, pids: list[int], names: list[str]) -> Iterable[str]:
        yield from (name for name in names if _pid_in(name) in pids)
        if not (others := [name for name in names if _pid_in(name) is None]):
            return
        for pid in pids:
            with suppress(OSError):  # it has just ended
                maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
                yield from (n for n in others if f" {self._shared_memory / n}" in maps)

    def _note(self, folder: Path, name: str, inode: int) -> None:
        try:
            (folder / _NOTES).mkdir(exist_ok=True)
            (folder / _NOTES / name).write_text(str(inode))
        except OSError as error:  # a full disk, or the folder is being removed
            get_log().warning("shared_memory_not_noted", name=name, reason=str(error))


def _pid_in(name: str) -> int | None:
    found = _NAME_WITH_PID.fullmatch(name)
    return int(found[1]) if found else None
