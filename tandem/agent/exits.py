"""Why a process ended: its signal, and the end of its log."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def killed_by(status: int) -> str:
    """Return the signal of a negative exit status, such as "SIGKILL, as the kernel does …"."""
    name = next((each.name for each in signal.Signals if each == -status), f"signal {-status}")
    return f"{name}, as the kernel does when memory runs out" if name == "SIGKILL" else name


def end_of_log(path: Path, *, start: int, most: int) -> str:
    """Return the last `most` bytes of a log that a process began at `start`. Raises `OSError`."""
    with path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(start if start <= size else 0, size - most))  # it may have been rotated
        return log.read(most).decode(errors="replace")
