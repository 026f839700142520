"""Look into folders from which a running gateway removes files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def entries(folder: Path) -> list[Path]:
    """The files and folders in a folder, by name; none where it is gone."""
    with suppress(FileNotFoundError):
        return sorted(folder.iterdir())
    return []


def watch_syncs(monkeypatch) -> list[Path]:
    """The files and folders that this process syncs from now on, where they are at that time."""
    synced: list[Path] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    return synced


def tree(folder: Path) -> set[Path]:
    """All files and folders below a folder; `os.walk` passes over those removed meanwhile."""
    return {
        Path(parent, name)
        for parent, folders, files in os.walk(folder)
        for name in (*folders, *files)
    }


def memory_files(process: int | str = "self") -> int:
    """How many copies of weights a process has open, for others or of others (`Handoff`)."""
    found = set()
    for file in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # by this one the folder is read
            if "tandem-weights" in str(file.readlink()):
                found.add(file.stat().st_ino)
    return len(found)
