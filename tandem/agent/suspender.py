"""Moves the GPU state of processes to host memory and back, without their help.

It serves workers that cannot sleep, such as trainers with another package's backend. State never
goes to disk: CRIU would end the processes, and the restored ones would not have the agent as their
parent, or its pipes."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.agent.host import driver_version
from tandem.errors import SuspendFailed

PROGRAM = "cuda-checkpoint"
_OLDEST_DRIVER = 570
"""The first driver that reports states, locks with a timeout, and suspends processes that use
NVML."""
_DEVICE = re.compile(r"/dev/nvidia(\d+|-uvm)")


@dataclass(frozen=True)
class CudaCheckpoint:
    """Suspends and resumes processes with NVIDIA's program `cuda-checkpoint` (see its `--help`).

    First it locks the CUDA calls of all processes, because ranks wait for each other on their GPUs.
    Then it moves each. The program cannot restore a process that it failed to move. It refuses
    memory that CUDA shares between processes, such as NCCL's. Both calls may be repeated, and raise
    `SuspendFailed`. A process may be unusable then, so the worker must be killed."""

    find_program: Callable[[str], str | None] = shutil.which
    driver: Callable[[], str] = driver_version

    def why_not(self) -> str:
        """Return why this host cannot do it, or ""."""
        version = self.driver()
        if not version:
            return "only processes on NVIDIA devices can be suspended, and this host has none"
        if int(version.partition(".")[0]) < _OLDEST_DRIVER:
            return f"NVIDIA's driver is {version}, and {_OLDEST_DRIVER} or a newer one is needed"
        if self.find_program(PROGRAM) is None:
            return f"{PROGRAM} is not installed"
        return ""

    async def suspend(self, pids: Sequence[int], *, timeout: float) -> None:
        """Move all state of the processes off the GPUs. If one fails, the others continue."""
        try:
            async with asyncio.timeout(timeout):
                lock = _Move("lock", "running", ("locked", "checkpointed"), timeout)
                await self._all(pids, lock)
                await self._all(pids, _Move("checkpoint", "locked", ("checkpointed",)))
        except (SuspendFailed, TimeoutError) as error:
            why = str(error) or f"it takes longer than {timeout:g} s"
            raise SuspendFailed(f"{why}; {await self._go_on(pids, timeout)}") from error

    async def resume(self, pids: Sequence[int], *, timeout: float) -> None:
        """Restore all state to the GPUs and let the processes continue."""
        try:
            async with asyncio.timeout(timeout):
                restore = _Move("restore", "checkpointed", ("locked", "running"))
                await self._all(pids, restore, _Move("unlock", "locked", ("running",)))
        except TimeoutError:
            raise SuspendFailed(f"resuming the worker took longer than {timeout:g} s") from None

    async def _go_on(self, pids: Sequence[int], timeout: float) -> str:
        """Let all processes continue if possible. Returns the result in words."""
        try:
            await self.resume(pids, timeout=timeout)
        except SuspendFailed as error:
            return f"and it does not go on as before: {error}"
        return "all processes go on"

    async def _all(self, pids: Sequence[int], *moves: _Move) -> None:
        """Do it for all processes at once. Raises the first error."""
        done = await asyncio.gather(
            *(self._carry_out(pid, moves) for pid in pids), return_exceptions=True
        )
        for fault in done:
            if isinstance(fault, BaseException):
                raise fault

    async def _carry_out(self, pid: int, moves: Sequence[_Move]) -> None:
        for move in moves:
            state = await self._state(pid)
            if state == move.start:
                limit = ["--timeout", f"{move.timeout * 1000:.0f}"] if move.timeout else []
                await self._run(pid, "--action", move.action, *limit)
                state = await self._state(pid)
            if state not in move.ends:
                raise SuspendFailed(f"process {pid} is {state} after {PROGRAM} {move.action}")

    async def _state(self, pid: int) -> str:
        return (await self._run(pid, "--get-state")).strip()

    async def _run(self, pid: int, *arguments: str) -> str:
        program = self.find_program(PROGRAM)
        if program is None:
            raise SuspendFailed(self.why_not())
        started = await asyncio.create_subprocess_exec(
            program,
            *arguments,
            "--pid",
            str(pid),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            said, complaint = await started.communicate()
        except BaseException:  # its time is over
            with suppress(ProcessLookupError):
                started.kill()
            await started.wait()
            raise
        if started.returncode != 0:
            text = (complaint or said).decode(errors="replace").strip()
            what = " ".join([PROGRAM, *arguments])
            raise SuspendFailed(f"{what} of process {pid} failed: {text or started.returncode}")
        return said.decode()


@dataclass(frozen=True)
class _Move:
    """An action of the program, from the state `start` to one of `ends`. Others are left alone."""

    action: str
    start: str
    ends: tuple[str, ...]
    timeout: float = 0.0


def uses_gpu(pid: int, *, proc: Path = Path("/proc")) -> bool:
    """Return whether a process uses a GPU. `/dev/nvidiactl` alone means that it only uses NVML."""
    with suppress(OSError):  # it has ended
        for link in (proc / str(pid) / "fd").iterdir():
            with suppress(OSError):  # it was closed meanwhile
                if _DEVICE.fullmatch(str(link.readlink())):
                    return True
    return False
