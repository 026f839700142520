"""Processes that are started before the workers that they become.

Most of a worker's start is the import of torch, transformers and vLLM. An idle process has done it,
and then gets a specification (`tandem.protocol.worker_link.PooledLink`). Until then it has no name,
secret, log or devices, and its output goes to the agent's."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from tandem.agent.environment import inherited
from tandem.agent.scratch import ScratchFolders
from tandem.agent.worker_process import kill_group
from tandem.errors import describe
from tandem.protocol.background import make_nicer
from tandem.protocol.worker import WorkerKind
from tandem.settings.workers import PoolSettings
from tandem.telemetry import get_log

_IMPORTS: dict[WorkerKind, str] = {"trainer": "transformers", "sampler": "vllm"}

_STDERR = 2
_NICENESS = 5
"""Added to the agent's, so that a gateway on these cores answers while workers compute."""
_IMPORTING_NICENESS = 15
"""For an importing idle process. Other processes get 30 times its share of a core."""
_LEAST_FREE_BYTES = 4 * 2**30
_LOOK_SECONDS = 0.5
_PRELOAD_SECONDS = 900.0
"""Long, because of the low priority."""
_HAND_OVER_SECONDS = 3.0
_KILLED_SECONDS = 10.0
_LONGEST_WAIT = 600.0
_TOGETHER_SECONDS = 60.0
"""Engines that start within this time are needed together."""
_RECENT_SECONDS = 3600.0
_REMEMBERED = 32
_MOST_GROWN = 4


def default_command(kind: WorkerKind) -> list[str]:
    module = "trainer_service.jobs" if kind == "job" else f"{kind}_service"
    return [sys.executable, "-m", module]


def pool_sizes(settings: PoolSettings) -> dict[WorkerKind, int]:
    """Return the number of idle processes for each kind that can run here."""
    if not settings.processes:
        return {}
    needed = {kind: (library, f"{kind}_service") for kind, library in _IMPORTS.items()}
    return {kind: settings.processes for kind in needed if all(map(find_spec, needed[kind]))}


@dataclass(frozen=True, kw_only=True)
class Child:
    process: asyncio.subprocess.Process
    lifeline_fd: int
    report_fd: int
    scratch: Path | None

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        kill_group(self.pid)
        os.close(self.lifeline_fd)
        os.close(self.report_fd)


async def start_child(
    command: list[str],
    *,
    line: bytes = b"",
    output: int,
    scratches: ScratchFolders,
    spec_fd: int | None = None,
) -> Child:
    """Start a worker's program with `line` in its standard input and a temporary folder.

    Raises `OSError` if it cannot be executed."""
    # Python makes these descriptors uninheritable. The child gets only the ones below, so no worker
    # holds another's lifeline.
    stdin_fd, lifeline_fd = os.pipe()
    report_fd, worker_report_fd = os.pipe()
    spec: list[str] = []
    if spec_fd is not None:
        spec = ["--spec-fd", str(spec_fd), "--nice", str(_IMPORTING_NICENESS)]
    scratch = scratches.make()
    temporary = {} if scratch is None else {"TMPDIR": str(scratch)}
    try:
        os.write(lifeline_fd, line)  # fits into the empty pipe, so it never blocks
        process = await asyncio.create_subprocess_exec(
            *command,
            "--report-fd",
            str(worker_report_fd),
            *spec,
            stdin=stdin_fd,
            stdout=output,
            stderr=output,
            pass_fds=(worker_report_fd, *([] if spec_fd is None else [spec_fd])),
            start_new_session=True,
            env={**inherited(os.environ), "PYTHONUNBUFFERED": "1", **temporary},
        )
        with suppress(OSError):  # it has ended, or the kernel refuses more changes now
            make_nicer(process.pid, by=_NICENESS)
        if scratch is not None:
            scratches.note_pid(scratch, process.pid)
    except BaseException:
        if scratch is not None:
            scratches.remove(scratch)
        os.close(lifeline_fd)
        os.close(report_fd)
        raise
    finally:
        os.close(stdin_fd)
        os.close(worker_report_fd)
    return Child(process=process, lifeline_fd=lifeline_fd, report_fd=report_fd, scratch=scratch)


@dataclass(eq=False)
class _Idle:
    """A child, and the launcher's end of the socket for its specification."""

    child: Child
    socket: socket.socket
    scratches: ScratchFolders

    async def hand_over(self, line: bytes, log_fd: int) -> bool:
        """Returns False if it has ended or hangs."""
        try:
            sent = socket.send_fds(self.socket, [line], [log_fd])
            return sent == len(line) and await self.answered(_HAND_OVER_SECONDS)
        except OSError:
            return False

    async def answered(self, timeout: float) -> bool:
        """Return whether it reports the end of its current task within `timeout` seconds."""
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(loop.sock_recv(self.socket, 1), timeout) != b""
        except (OSError, TimeoutError):
            return False

    def kill(self) -> None:
        self.child.kill()
        self.socket.close()

    async def gone(self) -> None:
        """Wait until it has ended, or hangs in the kernel."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.child.process.wait(), _KILLED_SECONDS)
        if self.child.scratch is not None:
            await asyncio.to_thread(self.scratches.remove, self.child.scratch)


class Pool:
    """Keeps `sizes` idle processes of each kind while memory is free, and up to four for engines if
    so many started within a minute of the last hour. Make it in an event loop.

    They are added one at a time while `quiet`, because a starting worker needs the processors. A
    process that ends by itself is replaced after a growing delay."""

    def __init__(
        self,
        *,
        sizes: Mapping[WorkerKind, int],
        command: Callable[[WorkerKind], list[str]],
        quiet: Callable[[], bool],
        scratches: ScratchFolders,
    ) -> None:
        self._sizes = sizes
        self._scratches = scratches
        self._command = command
        self._quiet = quiet
        self._idle: dict[WorkerKind, list[_Idle]] = {kind: [] for kind in sizes}
        self._ends: dict[WorkerKind, int] = dict.fromkeys(sizes, 0)
        self._not_before: dict[WorkerKind, float] = dict.fromkeys(sizes, 0.0)
        self._starts = deque[float](maxlen=_REMEMBERED)
        """The times of the last starts of engines."""
        self._watches: set[asyncio.Task[None]] = set()
        self._log = get_log()
        self._clock = asyncio.get_running_loop().time
        self._filling = asyncio.create_task(self._fill()) if sizes else None

    def pids(self, kind: WorkerKind) -> list[int]:
        return [idle.child.pid for idle in self._idle.get(kind, ())]

    def children(self) -> list[Child]:
        return [idle.child for waiting in self._idle.values() for idle in waiting]

    async def take_process(self, kind: WorkerKind, *, line: bytes, log_fd: int) -> Child | None:
        """Turn an idle process into the worker with this specification, with its output in the log.

        Returns None if no process accepts it. Processes that refused are gone."""
        if kind == "sampler":
            self._starts.append(self._clock())
        waiting = self._idle.get(kind, [])
        while waiting:
            idle = waiting.pop(0)
            try:
                taken = await idle.hand_over(line, log_fd)
            except BaseException:
                idle.kill()
                raise
            if taken:
                idle.socket.close()
                self._ends[kind] = 0
                return idle.child
            idle.kill()
            await idle.gone()
            self._note_end(kind, idle)
        return None

    async def close(self) -> None:
        if self._filling is None:
            return
        self._filling.cancel()
        await asyncio.wait({self._filling})
        left = [idle for waiting in self._idle.values() for idle in waiting]
        self._idle.clear()
        for idle in left:
            idle.kill()
        await asyncio.gather(*(idle.gone() for idle in left))

    def _size(self, kind: WorkerKind) -> int:
        """Return the number of idle processes that should wait."""
        if kind != "sampler":
            return self._sizes[kind]
        starts = [at for at in self._starts if at > self._clock() - _RECENT_SECONDS]
        together = (sum(at <= each < at + _TOGETHER_SECONDS for each in starts) for at in starts)
        return max(self._sizes[kind], min(_MOST_GROWN, max(together, default=0)))

    async def _fill(self) -> None:
        while True:
            for kind in self._sizes:
                missing = len(self._idle[kind]) < self._size(kind)
                missing = missing and self._clock() >= self._not_before[kind]
                if missing and self._quiet() and _memory_is_free():
                    await self._add(kind)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _add(self, kind: WorkerKind) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                child = await start_child(
                    self._command(kind),
                    output=_STDERR,
                    scratches=self._scratches,
                    spec_fd=theirs.fileno(),
                )
            except BaseException as error:
                ours.close()
                if not isinstance(error, OSError):
                    raise
                self._log.error("idle_process_not_started", kind=kind, error=describe(error))
                self._wait_longer(kind)
                return
        idle = _Idle(child, ours, self._scratches)
        try:
            ready = await idle.answered(_PRELOAD_SECONDS)
        except BaseException:
            idle.kill()
            await idle.gone()
            raise
        if not ready:
            idle.kill()
            await idle.gone()
            self._note_end(kind, idle)
            return
        self._log.info("idle_process_ready", kind=kind, pid=child.pid)
        self._idle[kind].append(idle)
        watch = asyncio.create_task(self._watch(kind, idle))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _watch(self, kind: WorkerKind, idle: _Idle) -> None:
        """Remove a process that ends while it is idle."""
        await idle.child.process.wait()
        waiting = self._idle.get(kind, [])
        if idle in waiting:
            waiting.remove(idle)
            # Immediately, because `_fill` may look while the files are removed.
            self._note_end(kind, idle)
            idle.kill()
            await idle.gone()

    def _note_end(self, kind: WorkerKind, idle: _Idle) -> None:
        status = idle.child.process.returncode
        self._log.warning("idle_process_ended", kind=kind, pid=idle.child.pid, status=status)
        self._wait_longer(kind)

    def _wait_longer(self, kind: WorkerKind) -> None:
        self._ends[kind] += 1
        self._not_before[kind] = self._clock() + seconds_until_the_next(self._ends[kind])


def seconds_until_the_next(ends: int) -> float:
    return min(_LONGEST_WAIT, 2.0 ** min(ends, 10))


def _memory_is_free() -> bool:
    return int(psutil.virtual_memory().available) >= _LEAST_FREE_BYTES
