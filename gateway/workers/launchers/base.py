"""The launcher interface, through which the gateway runs its workers on processes or containers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol, TypeAlias

from gateway.workers.needs import Needs
from gateway.workers.requests import WorkerRequest
from tandem.agent.host import Host
from tandem.agent.preflight import JobNeeds, PreflightCheck
from tandem.protocol.worker import WorkerExit, WorkerHandle, WorkerKind, WorkerSpec


class Launcher(Protocol):
    """Starts and stops workers, in one event loop.

    A worker counts as gone only when none of its processes is left. An unknown state raises
    `WorkerMayRun`."""

    @property
    def name(self) -> str:
        """Its name in reasons of waits."""
        ...

    @property
    def metrics_address(self) -> str:
        """HOST:PORT of the metrics of the program that starts the workers, or ""."""
        ...

    @property
    def reports(self) -> bool:
        """Whether exits would be reported now."""
        ...

    def prepare(self, request: WorkerRequest, needs: Callable[[], Needs], /) -> WorkerRequest:
        """Return the request with the bytes of its worker, as `Prepare`. Raises `InvalidRequest` if
        the launcher cannot start a worker of unknown needs."""
        ...

    async def preflight(self, needs: JobNeeds, *, timeout: float) -> tuple[PreflightCheck, ...]:
        """Return the checks of a job's start where it would start, without its devices.

        A check that takes longer than `timeout` seconds is a fault. Raises `WorkerStartFailed` or
        `WorkerMayRun` if nobody answers, and `JobFailed` if it starts no jobs."""
        ...

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start a worker and return when it has an address.

        Raises `WorkerStartFailed` with the worker's reason or last log lines, or `WorkerMayRun`.
        After either, the caller stops the worker."""
        ...

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        """Ask the worker to end, and kill it after the stop timeout, or at once (`at_once`).

        Returns when it is gone, also for an unknown worker. The request stays in effect if the
        caller goes away, and may be repeated. Raises `WorkerMayRun` if nobody answers."""
        ...

    async def suspend(self, worker_id: str, *, lease: int, timeout: float) -> None:
        """Move the device memory of a worker that cannot sleep to the host. `lease` is the token of
        its Sleep. An older token raises `IllegalTransition`.

        Raises `CannotSleep` if a job does not use its devices yet, and `SuspendFailed`. After the
        latter, the worker must be stopped."""
        ...

    async def resume(self, worker_id: str, *, lease: int, timeout: float) -> None:
        """Undo `suspend` with the token of its Wake. Raises as `suspend`."""
        ...

    async def list(self) -> list[WorkerHandle]:
        """Return the running workers with an address, including another gateway's. All others end,
        and `stop` waits for it. Raises `WorkerStartFailed` or `WorkerMayRun`."""
        ...

    async def describe_host(self) -> Host:
        """Describe the workers' host. Raises `WorkerStartFailed` or `WorkerMayRun` if it is
        unreachable."""
        ...

    def explain(self, worker_id: str) -> str:
        """Return the reason for the wait for a worker's start or end, or ""."""
        ...

    def watch(self) -> AsyncIterator[WorkerExit]:
        """Yield exits of workers with an address that were not requested.

        Each exit goes to all iterators, when the worker is gone. Recent exits may come first.
        Iterators end when the launcher closes."""
        ...

    async def close(self) -> None:
        """Let go of all workers. Idempotent."""
        ...


Launchers: TypeAlias = Mapping[WorkerKind, Launcher]
"""The launcher of each kind of workers. One launcher may start all."""


def for_each_kind(launcher: Launcher) -> Launchers:
    return {"trainer": launcher, "sampler": launcher, "job": launcher}
