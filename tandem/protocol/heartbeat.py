"""Heartbeats of gateway and agent: one byte a second on a pipe to their supervisor.

They detect a process with a hanging event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress

HEARTBEAT_FD = "SUPERVISOR_HEARTBEAT_FD"
"""The environment variable with the pipe's descriptor. It is unset without a supervisor."""

_INTERVAL = 1.0
_STANDSTILL = 1.0
_READ_BYTES = 4096


async def send_heartbeats() -> None:
    if not (name := os.environ.pop(HEARTBEAT_FD, "")):  # children send none
        return
    os.set_blocking(int(name), False)
    while True:
        with suppress(OSError):  # the pipe is full or closed
            os.write(int(name), b".")
        await asyncio.sleep(_INTERVAL)


class ProcessHeartbeat:
    """Reads the heartbeats of one process, which inherits `fd`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read, self.fd = os.pipe()
        os.set_blocking(self._read, False)
        self._heard = False
        self._silent = 0.0
        self._listened_at = clock()

    def silence(self) -> float:
        """Return the seconds since the last heartbeat, or 0 before the first.

        Call it several times a second. A pause of the caller does not count."""
        now = self._clock()
        passed, self._listened_at = now - self._listened_at, now
        self._silent += min(passed, _STANDSTILL)
        with suppress(BlockingIOError):
            self._heard = bool(os.read(self._read, _READ_BYTES)) or self._heard
            self._silent = 0.0
        return self._silent if self._heard else 0.0

    def close(self) -> None:
        os.close(self._read)
        os.close(self.fd)
