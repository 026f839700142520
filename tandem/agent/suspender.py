"""Moves what processes have on their GPUs to host memory and back, without their doing anything.

For workers that cannot sleep by themselves, such as trainers with a backend of another package. The
agent has one `ProcessSuspender`: `CudaCheckpoint`. One that asks a snapshot agent of the node would
implement the same. Nothing goes to a disk: for that, CRIU would end the processes, and those that
it makes of their images would have neither the agent as their parent nor its pipes.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tandem.agent.host import driver_version
from tandem.errors import SuspendFailed

PROGRAM = "cuda-checkpoint"
_OLDEST_DRIVER = 570
"""The first that tells states, locks with a timeout, and suspends a process that uses NVML, as
torch does."""
_DEVICE = re.compile(r"/dev/nvidia(\d+|-uvm)")


class ProcessSuspender(Protocol):
    """Both ways may be repeated, and raise `SuspendFailed`: then some process may be of no use any
    more, and the worker is to be killed."""

    def why_not(self) -> str:
        """Return why this host cannot do it; "" if it can."""
        ...

    async def suspend(self, pids: Sequence[int], *, timeout: float) -> None:
        """Return when nothing of the processes is on a GPU any more. If that fails for one, the
        others go on."""
        ...

    async def resume(self, pids: Sequence[int], *, timeout: float) -> None:
        """Return when all that was on the GPUs is there again, and all processes go on."""
        ...


@dataclass(frozen=True)
class CudaCheckpoint:
    """Implements `ProcessSuspender` by NVIDIA's program of this name (`--help` describes it).

    First the calls of CUDA of all processes are locked, since ranks wait for each other on their
    GPUs; then each is moved. The program does not bring back a process that it failed to move, and
    moves none with memory that CUDA shares between processes, which NCCL makes between GPUs.
    """

    find_program: Callable[[str], str | None] = shutil.which
    driver: Callable[[], str] = driver_version

    def why_not(self) -> str:
        version = self.driver()
        if not version:
            return "what can be suspended is on NVIDIA devices, and there are none"
        if int(version.partition(".")[0]) < _OLDEST_DRIVER:
            return f"NVIDIA's driver is {version}, and {_OLDEST_DRIVER} or a newer one is needed"
        if self.find_program(PROGRAM) is None:
            return f"{PROGRAM} is not installed"
        return ""

    async def suspend(self, pids: Sequence[int], *, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                lock = _Move("lock", "running", ("locked", "checkpointed"), timeout)
                await self._all(pids, lock)
                await self._all(pids, _Move("checkpoint", "locked", ("checkpointed",)))
        except (SuspendFailed, TimeoutError) as error:
            why = str(error) or f"it takes longer than {timeout:g} s"
            raise SuspendFailed(f"{why}; {await self._go_on(pids, timeout)}") from error

    async def resume(self, pids: Sequence[int], *, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                restore = _Move("restore", "checkpointed", ("locked", "running"))
                await self._all(pids, restore, _Move("unlock", "locked", ("running",)))
        except TimeoutError:
            raise SuspendFailed(f"to resume takes longer than {timeout:g} s") from None

    async def _go_on(self, pids: Sequence[int], timeout: float) -> str:
        """Let all processes that can go on; say whether all do."""
        try:
            await self.resume(pids, timeout=timeout)
        except SuspendFailed as error:
            return f"and it does not go on as before: {error}"
        return "all processes go on"

    async def _all(self, pids: Sequence[int], *moves: _Move) -> None:
        """Carry out the moves of each process, all at once. Raises what failed first."""
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
        """Return what the program says of a process."""
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
    """An action of the program, from `start` to one of `ends`. A process in another state is left
    as it is."""

    action: str
    start: str
    ends: tuple[str, ...]
    timeout: float = 0.0


def uses_gpu(pid: int, *, proc: Path = Path("/proc")) -> bool:
    """Return whether a process has a GPU open. One that has only `/dev/nvidiactl` asks NVML."""
    with suppress(OSError):  # it has ended
        for link in (proc / str(pid) / "fd").iterdir():
            with suppress(OSError):  # it was closed meanwhile
                if _DEVICE.fullmatch(str(link.readlink())):
                    return True
    return False
