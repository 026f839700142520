"""The launcher seam: what the gateway asks of whatever runs its workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tandem.worker import WorkerKind, WorkerSpec


@dataclass(frozen=True)
class WorkerHandle:
    """A worker that has bound its ports.

    Literal example: `WorkerHandle(worker_id="trainer-s-ab12-0", kind="trainer",
    address="127.0.0.1:40123", metrics_port=40124, pid=4711,
    log_path=Path(".tandem/logs/trainer-s-ab12-0.log"))`; the secret is never printed.
    """

    worker_id: str
    kind: WorkerKind
    address: str
    metrics_port: int
    pid: int
    log_path: Path
    secret: str = field(repr=False)


@dataclass(frozen=True)
class WorkerExit:
    """The end of a worker that nobody asked for. `reason` is one sentence for the client."""

    worker_id: str
    reason: str


class Launcher(Protocol):
    """Starts and ends workers. All methods belong to one event loop."""

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Returns when the worker has bound its port and reported its address.

        Raises `WorkerStartFailed` with the worker's own reason, or with the end of its log;
        then nothing of the worker is left.
        """
        ...

    async def wait_ready(self, worker_id: str) -> None:
        """Returns when the worker's gRPC health service says SERVING.

        Raises `WorkerStartFailed` as soon as the worker ends, or when the start timeout
        (counted from `start`) is over; then nothing of the worker is left.
        """
        ...

    async def stop(self, worker_id: str) -> None:
        """Asks the worker to end, and kills its group when it has not within the stop timeout.

        Returns when nothing of it is left. Does nothing for a worker that has ended or is
        not known.
        """
        ...

    def list(self) -> list[WorkerHandle]:
        """The workers that have reported an address and run."""
        ...

    def watch(self) -> AsyncIterator[WorkerExit]:
        """The ends that nobody asked for, and that no call to `start` or `wait_ready` told.

        Each end goes to every iterator; an iterator sees those after its creation, and
        finishes when the launcher is closed.
        """
        ...

    async def close(self) -> None:
        """Stops every worker, and lets no other start. Idempotent."""
        ...
