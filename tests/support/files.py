"""Looks into folders from which a running gateway removes files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def entries(folder: Path) -> list[Path]:
    """Return nothing if the folder is gone."""
    with suppress(FileNotFoundError):
        return sorted(folder.iterdir())
    return []


def watch_syncs(monkeypatch) -> list[Path]:
    """Return a list that collects this process's synced files and folders."""
    synced: list[Path] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    return synced


def tree(folder: Path) -> set[Path]:
    """`os.walk` skips removed ones."""
    return {
        Path(parent, name)
        for parent, folders, files in os.walk(folder)
        for name in (*folders, *files)
    }


def memory_files(process: int | str = "self") -> int:
    """Return the number of weight copies that a process has open for a `Handoff`."""
    found = set()
    for file in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this folder
            if "tandem-weights" in str(file.readlink()):
                found.add(file.stat().st_ino)
    return len(found)
