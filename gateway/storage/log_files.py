"""Rotates the log files of the gateway and its workers, and removes old ones.

Several writers append to one open file and would follow a rename, so the file is copied and then
truncated. Lines written in between are lost."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection
from pathlib import Path

_BLOCK = 2**20


def tidy_logs(
    folder: Path, *, max_bytes: int, copies: int, ttl: float, in_use: Collection[str]
) -> None:
    """Rotate logs above `max_bytes` into NAME.log.1, …, NAME.log.`copies`. Remove files unchanged
    for `ttl` seconds, except the logs of live processes (`in_use`, without `.log`). A new log
    repeats the first line, which names its process."""
    for log in folder.glob("*.log"):
        if log.is_file() and log.stat().st_size > max_bytes:
            _rotate(log, copies)
    expired = time.time() - ttl
    for file in folder.glob("*.log*"):
        live = file.suffix == ".log" and file.stem in in_use
        if file.is_file() and not live and file.stat().st_mtime < expired:
            file.unlink(missing_ok=True)


def _rotate(log: Path, copies: int) -> None:
    for number in range(copies, 1, -1):
        older = log.with_name(f"{log.name}.{number - 1}")
        if older.exists():
            older.replace(log.with_name(f"{log.name}.{number}"))
    with log.open("r+b") as full:
        first = full.readline(_BLOCK)
        full.seek(0)
        partial = log.with_name(f".{log.name}.partial")
        with partial.open("wb") as copy:
            partial.chmod(0o600)
            shutil.copyfileobj(full, copy, _BLOCK)
        partial.replace(log.with_name(f"{log.name}.1"))
        full.truncate(0)
    if first.endswith(b"\n"):
        with log.open("ab") as fresh:
            fresh.write(first)
