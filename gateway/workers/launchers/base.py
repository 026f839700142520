"""The launcher seam: what the gateway asks of whatever runs its workers.

Nothing here is particular to a child process; a launcher of containers implements the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from tandem.agent.host import Host
from tandem.protocol.worker import WorkerDetails, WorkerExit, WorkerHandle, WorkerSpec


class Launcher(Protocol):
    """Starts and stops workers. All methods belong to one event loop.

    That a worker is gone is said only when it is known: nothing is left of its processes. What the
    launcher cannot say, because whoever runs the workers does not answer, raises `WorkerMayRun`.
    """

    @property
    def reports(self) -> bool:
        """Whether it would tell of an exit now: whoever runs the workers answers."""
        ...

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start a worker; return once it has bound its port and reported its address.

        Raises `WorkerStartFailed` with the worker's own reason, or with the end of its log;
        then nothing of the worker is left. Raises `WorkerMayRun`.
        """
        ...

    async def wait_ready(self, worker_id: str) -> None:
        """Return once the worker's gRPC health service says SERVING.

        Raises `WorkerStartFailed` as soon as the worker ends, or when its start timeout
        (counted from `start`) is over; then nothing of the worker is left. Raises
        `WorkerMayRun`.
        """
        ...

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        """Ask the worker to end, and kill it when it has not within the stop timeout; `at_once`:
        kill it without asking.

        Returns when nothing of it is left, also for one that has ended or is not known. Raises
        `WorkerMayRun` otherwise, after a time; it may be asked again, and what was asked for is
        still done by whoever heard of it.
        """
        ...

    async def suspend(self, worker_id: str, *, lease: int, timeout: float) -> None:
        """Move what a worker that cannot sleep by itself has on its devices to host memory; return
        when nothing of it is there. `lease` is the token of its Sleep: an older one than the newest
        of the worker changes nothing, and is an `IllegalTransition`.

        Raises `SuspendFailed`; then the worker is to be stopped.
        """
        ...

    async def resume(self, worker_id: str, *, lease: int, timeout: float) -> None:
        """The way back, with the token of its Wake. Raises as `suspend`."""
        ...

    async def list(self) -> list[WorkerHandle]:
        """Return the running workers that have reported an address, also those that another
        gateway started. Those that it was about to start or to stop are ended first: nothing is
        left of a worker that is not returned. Raises `WorkerStartFailed` or `WorkerMayRun`."""
        ...

    async def describe_host(self) -> Host:
        """Return what the host of the workers has. Raises `WorkerStartFailed` or `WorkerMayRun`
        when it cannot be reached."""
        ...

    def describe(self, worker_id: str) -> WorkerDetails:
        """Return what this launcher can show of a worker; empty for one that it does not run."""
        ...

    def explain(self, worker_id: str) -> str:
        """Say what a worker that starts waits for; "" for nothing, or for what is not known."""
        ...

    def watch(self) -> AsyncIterator[WorkerExit]:
        """Yield every exit that was not requested and that no `start` or `wait_ready` raised.

        Each exit goes to every iterator that existed when it happened, once nothing is left of
        the worker. Those that happened just before may come first, for a gateway that was not
        there. The iterators finish when the launcher is closed.
        """
        ...

    async def close(self, *, leaving: bool = False) -> None:
        """Start no more workers, and stop every one, unless they are left to the next gateway; so
        are those that do not end in time. Idempotent."""
        ...
