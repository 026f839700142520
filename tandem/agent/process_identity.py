"""Identifies a process among those with its number: later ones, or ones of other hosts and
containers."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def process_start(pid: int) -> str:
    """Return the start of a process and its namespace, or "" if it does not exist."""
    ticks = _ticks(pid)
    return ticks and f"{namespace()}{ticks}"


def namespace() -> str:
    """Return the scope of process numbers: this boot of the machine, and the container's first
    process."""
    return f"{_BOOT_ID.read_text().strip()} {_ticks(1)} "


def _ticks(pid: int) -> str:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return status.rpartition(")")[2].split()[19]  # not psutil's time, which follows the clock
