"""Steps: the orders of a decision to the supervisor."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from gateway.workers.overview import Overview, Way
from gateway.workers.table import EndState, WorkerRow


@dataclass(frozen=True)
class SleepPlan:
    """A way to put a worker to sleep. Its state may take `most_bytes`, where 0 is no limit."""

    way: Way
    most_bytes: int = 0


@dataclass(frozen=True)
class PlaceRows:
    """Write these rows in one transaction: some got their groups, and others were overtaken."""

    rows: tuple[WorkerRow, ...]

    @property
    def placed(self) -> list[str]:
        """The keys of the rows that got their groups."""
        return [row.key for row in self.rows if row.group]


@dataclass(frozen=True)
class TakeGroup:
    """Return a row without a process to the queue: another request needs its group."""

    key: str


@dataclass(frozen=True)
class ForgetRow:
    """Delete a row that was released and has no process."""

    key: str


@dataclass(frozen=True)
class StartWorker:
    key: str


@dataclass(frozen=True)
class WakeWorker:
    key: str


@dataclass(frozen=True)
class PutToSleep:
    """Put a worker to sleep in the first way that works. If none does, it stays awake for a while,
    or is killed (`or_kill`)."""

    key: str
    plans: tuple[SleepPlan, ...]
    or_kill: bool = False


@dataclass(frozen=True)
class StopWorker:
    """End a worker. `at_once` kills it without asking. `ends_as` is the row's state afterwards."""

    key: str
    reason: str
    at_once: bool = True
    ends_as: EndState = "placed"


@dataclass(frozen=True)
class FindWorker:
    """Ask a lost worker and its launcher for its state."""

    key: str


@dataclass(frozen=True)
class AskToYield:
    """Admit no new call to a worker, so that it can sleep after its last one."""

    key: str


@dataclass(frozen=True)
class RefuseCalls:
    """End the waiting calls of a worker with an error, for this reason."""

    key: str
    reason: str


@dataclass(frozen=True)
class KeepAwake:
    """Admit calls again. With a `reason`, the worker had no room to sleep, and stays awake for a
    while."""

    key: str
    reason: str = ""


Step = (
    PlaceRows
    | TakeGroup
    | ForgetRow
    | StartWorker
    | WakeWorker
    | PutToSleep
    | StopWorker
    | FindWorker
    | AskToYield
    | RefuseCalls
    | KeepAwake
)


@dataclass
class Decision:
    """The steps of a decision, the overview after them, and the time of the next decision if
    nothing happens before."""

    overview: Overview
    steps: list[Step] = field(default_factory=list)
    again_at: float = math.inf

    def take(self, step: Step, *rows: WorkerRow) -> None:
        """Take a step that changes these rows at once."""
        self.steps.append(step)
        if rows:
            self.overview = self.overview.with_rows(rows)

    def begin(self, step: Step, keys: Iterable[str]) -> None:
        """Take a step during which these rows get no other one."""
        self.steps.append(step)
        self.overview = replace(self.overview, busy=self.overview.busy.union(keys))

    def end(self, step: StopWorker | ForgetRow | TakeGroup) -> None:
        self.steps.append(step)
        self.overview = self.overview.while_ending(self.overview.rows[step.key])

    def admit(self, row: WorkerRow) -> None:
        """Begin the waiting calls of an awake worker."""
        self.steps.append(KeepAwake(row.key))
        demand = self.overview.demand_of(row)
        uses = demand.uses + demand.waiting
        admitted = replace(demand, uses=uses, waiting=0, yielding=False)
        self.overview = self.overview.with_demand(row, admitted)

    def look_at(self, at: float) -> None:
        """Decide again at this time, unless it is past."""
        if at > self.overview.now:
            self.again_at = min(self.again_at, at)
