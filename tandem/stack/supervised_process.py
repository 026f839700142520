"""A child process that is restarted when it ends. Its log gives the reason."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from tandem.agent.exits import end_of_log, killed_by
from tandem.errors import unusable_directory
from tandem.protocol.heartbeat import HEARTBEAT_FD, ProcessHeartbeat
from tandem.protocol.worker import SUPERVISOR_PID

MOST_ENDS_WITHIN = 60.0
"""Seconds for which an end counts."""
_FIRST_WAIT = 0.25
_POLL_SECONDS = 0.05
_TAIL_BYTES = 16 * 1024


class SupervisedProcess:
    def __init__(
        self,
        *,
        name: str,
        command: list[str],
        environment: dict[str, str],
        log_path: Path,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.environment = environment
        self.log_path = log_path
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self.due = 0.0
        self._sentence = f"tandem {name}: "
        self._command = command
        self._clock = clock
        self._patience = patience
        self._heartbeats = ProcessHeartbeat()
        self._was_silent = False
        self._log_start = 0
        self._ends: deque[float] = deque()

    def start_process(self) -> None:
        try:
            log = open(self.log_path, "ab", opener=_private)  # noqa: SIM115 - closed below
        except OSError as error:
            raise unusable_directory(self.log_path.parent, error) from error
        last, self._heartbeats, self._was_silent = self._heartbeats, ProcessHeartbeat(), False
        last.close()
        with log:
            self._log_start = log.tell()
            self.started_at = self._clock()
            self.process = subprocess.Popen(
                self._command,
                env={
                    **self.environment,
                    HEARTBEAT_FD: str(self._heartbeats.fd),
                    SUPERVISOR_PID: str(os.getpid()),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._heartbeats.fd],
                start_new_session=True,  # so that Ctrl-C reaches it once, through stop()
                # No preexec_fn: it needs a real fork, in which gRPC's handlers can crash the child.
            )

    def kill_if_silent(self) -> None:
        """Kill it if its event loop has hung for too long."""
        if self._heartbeats.silence() > self._patience:
            self._was_silent = True
            self.kill()

    def start_when_due(self) -> None:
        if self._clock() >= self.due:
            self.start_process()

    def note_end(self, *, served: bool = True) -> int:
        """Schedule the restart. Returns the number of recent ends.

        Ends before it `served` all count, even if its starts take long."""
        now = self._clock()
        self._ends.append(now)
        while served and self._ends[0] < now - MOST_ENDS_WITHIN:
            self._ends.popleft()
        self.due = now + _FIRST_WAIT * 2 ** (len(self._ends) - 1)
        self.process = None
        return len(self._ends)

    def why_ended(self) -> str:
        """Return the process's last sentence, or its exit status in words."""
        assert self.process is not None
        if self._was_silent:
            return f"it answered nothing for {self._patience:g} s (log: {self.log_path})"
        try:
            text = end_of_log(self.log_path, start=self._log_start, most=_TAIL_BYTES)
        except OSError:  # somebody removed it: continue without a message
            text = ""
        for line in reversed(text.splitlines()):
            if line.startswith(self._sentence):
                return f"{line.removeprefix(self._sentence)} (log: {self.log_path})"
        status = self.process.wait()
        if status < 0:
            return f"it was killed by {killed_by(status)} (log: {self.log_path})"
        return f"it exited with status {status}; see its log, {self.log_path}"

    def stop_process(
        self,
        number: signal.Signals,
        timeout: float,
        *,
        at_once: threading.Event,
        say: Callable[[str], None],
    ) -> None:
        """Signal it, and kill it after `timeout` seconds or on `at_once`. `say` gets its
        messages."""
        if self.process is None or self.process.poll() is not None:
            return
        try:
            with self._read_log() as log:
                log.seek(0, os.SEEK_END)
                self.process.send_signal(number)
                deadline = time.monotonic() + timeout
                while self.process.poll() is None and time.monotonic() < deadline:
                    if at_once.wait(_POLL_SECONDS):
                        break
                    for line in (each.decode(errors="replace") for each in log):
                        if line.startswith(self._sentence):
                            say(line.removeprefix(self._sentence).rstrip())
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        self._heartbeats.close()

    def _read_log(self) -> IO[bytes]:
        try:
            return self.log_path.open("rb")
        except OSError:  # somebody removed it: continue without a message
            return io.BytesIO()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
