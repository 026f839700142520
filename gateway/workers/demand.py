"""Demand: the running and waiting calls of one worker, in memory only, and its last failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gateway.workers.adapters import Moved
from gateway.workers.overview import Demand, WorkerBytes
from gateway.workers.steps import SleepPlan

_SECOND_WAIT = 0.5
_JITTER = 0.2


@dataclass
class Backoff:
    """Waits of about 0, 0.5, 1, 2, 4, … 30, 30 seconds until work is done. Each is up to a fifth
    shorter at random, so that workers that failed together start apart."""

    cap: float = 30.0
    uniform: Callable[[], float] = random.random
    failures: int = 0

    def worked(self) -> None:
        self.failures = 0

    def failed(self) -> float:
        """Note a failure and return the wait in seconds."""
        doubled = _SECOND_WAIT * 2.0 ** (min(self.failures, 32) - 1)
        wait = min(self.cap, doubled) if self.failures else 0.0
        self.failures += 1
        return wait * (1 - _JITTER * self.uniform())


@dataclass(eq=False, kw_only=True)
class WorkerCalls:
    """One gateway's knowledge of a worker beside its row. Times are as in `Demand`.

    `open_steps` names the callers whose gradients wait for a step. `busy_seconds` is the time with
    calls since the worker woke, and `used_seconds` the time in all. Neither counts running
    calls. The last step took `step_seconds` of work, and the present one `present_seconds` so
    far."""

    clock: Callable[[], float]
    backoff: Backoff = field(default_factory=Backoff)
    bytes: WorkerBytes = field(default_factory=WorkerBytes)
    uses: int = 0
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    waiting_since: float = 0.0
    open_steps: set[str] = field(default_factory=set)
    busy_since: float = 0.0
    busy_seconds: float = 0.0
    used_seconds: float = 0.0
    step_seconds: float = 0.0
    present_seconds: float = 0.0
    idle_since: float = 0.0
    served_at: float = 0.0
    started_at: float = 0.0
    rests_until: float = 0.0
    stays_until: float = 0.0
    refused_at: float = 0.0
    yielding: bool = False
    crashed: bool = False
    """Whether the last start ended in a crash."""
    keeps_devices: bool = False

    def as_demand(self, *, silent_for: float) -> Demand:
        return Demand(
            uses=self.uses,
            used_seconds=self.used_seconds + self.running_seconds,
            step_seconds=self.step_seconds,
            waiting=len(self.waiting),
            waiting_since=self.waiting_since,
            open_step=bool(self.open_steps),
            idle_since=self.idle_since,
            served_at=self.served_at,
            started_at=self.started_at,
            yielding=self.yielding,
            silent_since=self.clock() - silent_for if silent_for else 0.0,
            rests_until=self.rests_until,
            stays_until=self.stays_until,
            refused_at=self.refused_at,
            keeps_devices=self.keeps_devices,
        )

    # --- Calls --------------------------------------------------------------------------------

    def note_arrival(self, *, patience: float) -> None:
        """Note a call. After a pause of more than `patience` seconds, it begins another step.

        A step counts as half of its predecessor at least, because a worker may also have short
        ones."""
        paused = not self.uses and not self.waiting and not self.open_steps
        if paused and self.present_seconds and self.clock() - self.idle_since > patience:
            self.step_seconds = max(self.present_seconds, self.step_seconds / 2)
            self.present_seconds = 0.0

    def begin_use(self) -> None:
        if not self.uses:
            self.busy_since = self.clock()
        self.uses += 1

    def end_use(self) -> float:
        """End a call. Return the seconds of work if it was the last one, else 0."""
        self.uses -= 1
        if self.uses:
            return 0.0
        self.idle_since = self.clock()
        seconds = self.idle_since - self.busy_since
        self.busy_seconds += seconds
        self.used_seconds += seconds
        self.present_seconds += seconds
        return seconds

    @property
    def running_seconds(self) -> float:
        """Seconds since the worker began to work, or 0 if it is idle."""
        return self.clock() - self.busy_since if self.uses else 0.0

    @property
    def waited_seconds(self) -> float:
        """Seconds since the oldest waiting call began to wait, or 0 without one."""
        return self.clock() - self.waiting_since if self.waiting else 0.0

    def wait(self) -> asyncio.Future[None]:
        """Return a future that is done when a call may begin."""
        if not self.waiting:
            self.waiting_since = self.clock()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        return turn

    def give_up(self, turn: asyncio.Future[None]) -> None:
        """End a wait that was cancelled. If its call had just begun, end the call."""
        if turn in self.waiting:
            self.waiting.remove(turn)
        elif not turn.cancelled() and turn.exception() is None:
            self.end_use()

    def admit(self) -> None:
        """Begin all waiting calls."""
        self.yielding = False
        turns, self.waiting = self.waiting, []
        for turn in turns:
            if not turn.done():  # otherwise its task was cancelled just now
                self.begin_use()
                turn.set_result(None)

    def refuse(self, error: Exception) -> None:
        """Fail all waiting calls."""
        turns, self.waiting = self.waiting, []
        for turn in turns:
            if not turn.done():
                turn.set_exception(error)

    # --- The process --------------------------------------------------------------------------

    def note_started(self, *, on_host: bool) -> None:
        """Note a new process. It has nothing on the host. On cores, it has not measured yet."""
        self.started_at = self.idle_since = self.clock()
        self.crashed = False
        self.bytes = WorkerBytes(measured=not on_host)

    def note_reserved(self, plan: SleepPlan) -> None:
        """Reserve the bytes of the sleep under way."""
        on_disk = plan.way == "disk"
        self.bytes = replace(
            self.bytes,
            reserved_host=0 if on_disk else plan.most_bytes,
            reserved_disk=plan.most_bytes if on_disk else 0,
        )

    def note_not_asleep(self) -> None:
        """Note that the sleep under way failed."""
        self.bytes = replace(self.bytes, reserved_host=0, reserved_disk=0)

    def note_asleep(self, plan: SleepPlan, said: Moved, *, on_host: bool) -> None:
        pinned = self.bytes.host if plan.way == "host" and not on_host else 0
        self.bytes = WorkerBytes(
            measured=True,
            device=said.device,
            host=max(pinned, said.host),
            disk=said.disk,
            awake=self.bytes.awake,
            way=plan.way,
        )
        self.served_at = self.clock()
        self.yielding = False
        self.refused_at = self.stays_until = 0.0

    def note_awake(self, said: Moved, *, on_host: bool) -> None:
        pinned = 0 if on_host else self.bytes.host
        self.bytes = WorkerBytes(
            measured=True, device=said.device, host=max(pinned, said.host), awake=said.device
        )

    def note_ended(self) -> None:
        """Note that nothing is left of the process. Gradients without a step are lost."""
        self.served_at = self.clock()
        self.open_steps.clear()
        self.bytes = WorkerBytes()
        self.yielding = False
        self.refused_at = self.stays_until = 0.0

    def take_busy_seconds(self) -> float:
        """Return the seconds of work since the last call of this method."""
        seconds, self.busy_seconds = self.busy_seconds + self.running_seconds, 0.0
        if self.uses:
            self.busy_since = self.clock()
        return seconds
