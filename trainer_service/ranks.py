"""Rank 0's other ranks: started as its child processes, watched, and ended with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

# A rank that dies takes its peers' collectives with it: they end within moments of each other,
# and the one that was killed is the cause.
_SETTLE_SECONDS = 0.2


@dataclass(frozen=True)
class _Death:
    rank: int
    returncode: int
    said: str

    @property
    def sentence(self) -> str:
        if self.returncode < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.returncode).name}"
        if self.said:
            return f"rank {self.rank} failed: {self.said}"
        return f"rank {self.rank} ended with exit code {self.returncode}"


class Ranks:
    """Ranks 1 … size-1. Start them from the main thread: they die with the thread that did.

    `on_death` is called once, from a thread, with a sentence that names the rank to blame.
    """

    def __init__(self, *, size: int, on_death: Callable[[str], None]) -> None:
        self._on_death = on_death
        self._processes: list[subprocess.Popen[bytes]] = []
        self._reports: list[int] = []
        self._deaths: list[_Death] = []
        self._changed = threading.Condition()
        self._stopping = False
        for _ in range(1, size):
            self._start()
        for rank in range(1, size):
            threading.Thread(
                target=self._watch, args=(rank,), name=f"watch-{rank}", daemon=True
            ).start()

    def _start(self) -> None:
        read, write = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer_service.rank", "--report-fd", str(write)],
            stdin=subprocess.PIPE,
            pass_fds=(write,),
        )
        os.close(write)
        self._processes.append(process)
        self._reports.append(read)

    def assign(self, rank: int, line: str) -> None:
        """Sends a rank its assignment. The pipe stays open: it is the rank's lifeline."""
        stdin = self._processes[rank - 1].stdin
        assert stdin is not None
        try:
            stdin.write(line.encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            return  # it died; the watcher says how

    def verdict(self, *, timeout: float) -> str:
        """Why the process group broke, if within `timeout` seconds a rank is seen to have died."""
        if not self._processes:
            return ""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._deaths), timeout)
            if not self._deaths:
                return ""
        return self._settled()

    def kill(self) -> None:
        """Ends all other ranks. They hold nothing that needs a farewell."""
        self._stopping = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(timeout=10)

    def _watch(self, rank: int) -> None:
        process, report = self._processes[rank - 1], self._reports[rank - 1]
        said = b""
        while part := os.read(report, 4096):
            said += part
        os.close(report)
        returncode = process.wait()
        if self._stopping:
            return
        with self._changed:
            first = not self._deaths
            self._deaths.append(_Death(rank, returncode, said.decode(errors="replace")))
            self._changed.notify_all()
        if first:
            self._on_death(self._settled())

    def _settled(self) -> str:
        time.sleep(_SETTLE_SECONDS)
        with self._changed:
            deaths = sorted(self._deaths, key=lambda death: death.returncode >= 0)
        return deaths[0].sentence
