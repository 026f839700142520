"""What tells a process from another one with the same number: a later one, or one of another host
or container, of which a shared volume tells."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.platform != "linux":
    import psutil

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def born(pid: int) -> str:
    """Return since when a process runs, and where; "" if there is none."""
    if sys.platform != "linux":
        try:
            return str(psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            return ""
    ticks = _ticks(pid)
    return ticks and f"{namespace()}{ticks}"


def namespace() -> str:
    """Return what the numbers of processes are of: this boot of the machine and, as one in a
    container sees only the processes there, which end with it, the first process of these."""
    return f"{_BOOT_ID.read_text().strip()} {_ticks(1)} " if sys.platform == "linux" else ""


def _ticks(pid: int) -> str:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return status.rpartition(")")[2].split()[19]  # not psutil's time: it moves with the clock
