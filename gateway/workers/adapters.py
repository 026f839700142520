"""The adapter seam: how the supervisor reaches one kind of worker.

An adapter knows the launcher that runs a worker and the client that calls it. The supervisor knows
neither. There is one adapter for trainers, one for engines and one for jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.workers.groups import WorkerGroup
from gateway.workers.steps import SleepPlan
from gateway.workers.table import WorkerRow


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A worker's answer to a sleep or a wake: the bytes that it moved, and those that it has."""

    moved: int = 0
    device: int = 0
    host: int = 0
    disk: int = 0


@dataclass(frozen=True, kw_only=True)
class Found:
    """A worker of an earlier gateway. `silent`: its launcher says that it runs, and the worker
    itself does not answer."""

    state: Literal["awake", "asleep", "silent", "gone"]
    has: Moved = Moved()


class WorkerAdapter(Protocol):
    """Each method may be cancelled. Each call carries the row's token and the gateway's epoch."""

    def new_process(self, row: WorkerRow) -> str:
        """Return an id for the next process of a row. No other process has it."""
        ...

    async def start(self, row: WorkerRow, group: WorkerGroup) -> None:
        """Start the row's process on its group, and return when it serves. Raises
        `WorkerStartFailed`."""
        ...

    async def sleep(self, row: WorkerRow, plan: SleepPlan) -> Moved:
        """Return when the worker is asleep.

        Raises `OutOfMemory`, `StorageFailed` or `CannotSleep` if the worker found no room and is
        still awake. After any other error it is of no use.
        """
        ...

    async def wake(self, row: WorkerRow) -> Moved:
        """Return when the worker is awake. After an error it is of no use."""
        ...

    async def stop(self, row: WorkerRow, *, at_once: bool) -> None:
        """Return when nothing is left of the row's process. Raises `WorkerMayRun` if that cannot
        be known now. Then the supervisor asks again."""
        ...

    async def find(self, row: WorkerRow, group: WorkerGroup) -> Found:
        """Return how a worker of an earlier gateway is, after it has heard of this one and has
        ended its last sleep or wake. Raises `WorkerMayRun` if neither worker nor launcher
        answers."""
        ...

    async def stop_strangers(self, is_known: Callable[[str], bool]) -> None:
        """Stop each process of this kind that Tandem started and no row names. Ask `is_known` after
        the launcher has listed its processes: others may start meanwhile."""
        ...

    def silent_for(self, row: WorkerRow) -> float:
        """Return the seconds since the worker last answered its heartbeat, or 0 if it answers."""
        ...
