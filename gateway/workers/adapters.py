"""The adapter seam: the supervisor reaches each kind of worker through an adapter.

An adapter knows the launcher that runs a worker and the client that calls it. The supervisor knows
neither."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.workers.groups import WorkerGroup
from gateway.workers.steps import SleepPlan
from gateway.workers.table import WorkerRow


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A worker's answer to a sleep or a wake: the bytes that it `moved`, and its bytes now."""

    moved: int = 0
    device: int = 0
    host: int = 0
    disk: int = 0


class StillAtWork(Exception):
    """A worker is at calls of an earlier gateway, and stays awake until they have ended."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The answer to `find`. The connection to a `silent` worker broke, and its launcher says that
    it runs. A `useless` worker must end, for this `reason`."""

    state: Literal["awake", "asleep", "silent", "useless", "gone"]
    has: Moved = Moved()
    reason: str = ""


class WorkerAdapter(Protocol):
    """Each method may be cancelled. Each call carries the row's token and the gateway's epoch."""

    def new_process(self, row: WorkerRow) -> str:
        """Return a unique id for the next process of a row."""
        ...

    async def start(self, row: WorkerRow, group: WorkerGroup) -> None:
        """Start the row's process on its group, and return when it serves. The launcher sets the
        deadline. Raises `WorkerStartFailed`."""
        ...

    async def sleep(self, row: WorkerRow, plan: SleepPlan) -> Moved:
        """Return when the worker is asleep.

        Raises `OutOfMemory`, `StorageFailed` or `CannotSleep` if the worker found no room and is
        still awake, and `StillAtWork`. After any other error it is useless."""
        ...

    async def wake(self, row: WorkerRow) -> Moved:
        """Return when the worker is awake. After an error it is useless."""
        ...

    async def stop(self, row: WorkerRow, *, at_once: bool) -> None:
        """Return when nothing is left of the row's process. Raises `WorkerMayRun` if nobody knows
        that now. Then the supervisor asks again."""
        ...

    async def find(self, row: WorkerRow, group: WorkerGroup) -> Found:
        """Return the state of a worker of an earlier gateway, after it has heard of this gateway
        and ended its last sleep or wake. Raises `WorkerMayRun` if neither worker nor launcher
        answers."""
        ...

    async def stop_strangers(self, is_known: Callable[[str], bool]) -> None:
        """Stop each process of this kind that no row names. Ask `is_known` after the launcher has
        listed its processes, since others may start meanwhile."""
        ...

    def explain(self, row: WorkerRow) -> str:
        """Return the reason for the wait for a start or an end, or ""."""
        ...

    def silent_for(self, row: WorkerRow) -> float:
        """Return the seconds since the last answered heartbeat, or 0 if the worker answers."""
        ...
