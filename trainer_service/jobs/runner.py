"""torchrun as a child process: its environment, its output, its end, and the end of its ranks.

torch elastic starts each rank in a session of its own, so signals to this process's group do not
reach them. Orphans below this process become its children (`PR_SET_CHILD_SUBREAPER`), so it finds
and kills all. If this process is killed, the kernel kills torchrun, and ranks that asked for it.
The agent kills others."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from tandem.backends.jobs import STOPPED, JobEnd
from tandem.protocol.worker import JobSpec, become_subreaper, die_with_parent
from trainer_service.jobs.end import reason_of

_STDOUT = 1
_TAIL_BYTES = 16 * 2**10
_CHUNK_BYTES = 64 * 2**10
_NOT_FOUND = 127
"""The shell's status for a program that cannot be executed."""
_MARGIN = 3.0
"""Seconds of the stop timeout in which this process kills ranks and writes the end."""
_KILLED_SECONDS = 5.0
_POLL_SECONDS = 0.02
_OF_OUR_INTERPRETER = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_OF_ONE_RANK = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""The host may suspend a single rank. torch would take a long pause for a hang of NCCL."""


class JobProcess:
    """Starts torchrun. Create it in the main thread, with which torchrun dies.

    Its output goes to standard output. A line that cannot be written there is lost, and does not
    end the job."""

    def __init__(self, job: JobSpec, *, error_file: Path, stop_timeout: float) -> None:
        self._grace = max(1.0, stop_timeout - _MARGIN)
        self._error_file = error_file
        self._tail = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._fault = ""
        become_subreaper()
        parent = os.getpid()
        try:
            self._process = subprocess.Popen(
                job.argv,
                env=environment_of(job, os.environ, error_file=self._error_file, grace=self._grace),
                cwd=job.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: die_with_parent(parent),
            )
        except OSError as error:
            self._fault = f"{Path(job.argv[0]).name} could not be started: {error.strerror}"
            return
        assert self._process.stdout is not None
        self._copying = threading.Thread(
            target=self._copy, args=(self._process.stdout,), name="output", daemon=True
        )
        self._copying.start()

    async def ended(self) -> JobEnd:
        """Return the end of torchrun once nothing of it is left. SIGTERM and SIGINT end it."""
        if self._process is None:
            return self._end(_NOT_FOUND, self._fault)
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        stopping = asyncio.create_task(stop.wait())
        exited = asyncio.create_task(asyncio.to_thread(self._process.wait))
        await asyncio.wait({stopping, exited}, return_when=asyncio.FIRST_COMPLETED)
        if not exited.done():
            self._process.terminate()  # torchrun passes it on to its ranks
            await asyncio.wait({exited}, timeout=self._grace)
        stopping.cancel()
        await asyncio.to_thread(self.kill)
        status = await exited
        if stop.is_set() and status:
            return self._end(STOPPED, "it was asked to end")
        if not status:
            return self._end(0, "")
        output = self._tail.decode(errors="replace")
        return self._end(status, reason_of(status, error_file=self._error_file, output=output))

    def kill(self) -> None:
        """Kill torchrun and all processes below this one. Return when they are gone, or hang in the
        kernel."""
        deadline = time.monotonic() + _KILLED_SECONDS
        while (left := self._descendants()) and time.monotonic() < deadline:
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(_POLL_SECONDS)
        if self._process is not None:
            self._copying.join(max(0.0, deadline - time.monotonic()))

    def _descendants(self) -> list[psutil.Process]:
        """Return the running processes below this one. Dead orphans are removed."""
        running = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    running.append(process)
                elif self._process is None or process.pid != self._process.pid:
                    with suppress(ChildProcessError):  # the child of another process
                        os.waitpid(process.pid, os.WNOHANG)
        return running

    def _copy(self, output: IO[bytes]) -> None:
        with output:
            while chunk := os.read(output.fileno(), _CHUNK_BYTES):
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
                with suppress(OSError):  # a full disk
                    os.write(_STDOUT, chunk)

    @staticmethod
    def _end(status: int, reason: str) -> JobEnd:
        return JobEnd(status=status, reason=reason, at=time.time())


def environment_of(
    job: JobSpec, inherited: Mapping[str, str], *, error_file: Path, grace: float
) -> dict[str, str]:
    """Return the environment of torchrun. Its ranks meet on a free port of this machine.

    The interpreter's own variables stay out, because the framework has another interpreter."""
    kept = {name: value for name, value in inherited.items() if name not in _OF_OUR_INTERPRETER}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "OMP_NUM_THREADS": str(max(1, (cores or 1) // job.processes)),
        **kept,
        **(_OF_ONE_RANK if job.processes == 1 else {}),
        **job.environment,
        **{name: inherited[name] for name in _DEVICES if name in inherited},
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": str(job.processes),
        "PET_STANDALONE": "1",
        "PET_LOCAL_ADDR": "127.0.0.1",
        "PET_SHUTDOWN_TIMEOUT": str(int(grace)),
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }
