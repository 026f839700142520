"""The heartbeats of gateway and agent: a byte a second, on a pipe that their supervisor reads.

One whose event loop does not run any more is alive for the kernel, and for nobody else.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress

HEARTBEAT_FD = "SUPERVISOR_HEARTBEAT_FD"
"""The variable that names the pipe; absent without a supervisor that listens."""

_INTERVAL = 1.0
_STANDSTILL = 1.0
_READ_BYTES = 4096


async def send_heartbeats() -> None:
    """Send them as long as the event loop runs."""
    if not (name := os.environ.pop(HEARTBEAT_FD, "")):  # its children send none
        return
    os.set_blocking(int(name), False)
    while True:
        with suppress(OSError):  # nobody has read for a day, or nobody is left to
            os.write(int(name), b".")
        await asyncio.sleep(_INTERVAL)


class ProcessHeartbeat:
    """What is heard of one process, which is given `fd`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read, self.fd = os.pipe()
        os.set_blocking(self._read, False)
        self._heard = False
        self._silent = 0.0
        self._listened_at = clock()

    def silence(self) -> float:
        """Return the seconds since the last one; 0 before the first. Call it several times a
        second: while nobody listened, nothing could be heard, which is not the sender's silence."""
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
