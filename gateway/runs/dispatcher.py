"""The dispatcher of one run: operations go to the trainer in `seq_id` order, a few ahead.

Operations may arrive in any order. What comes next is sent as soon as it is there and fewer
than `window` are under way; each call names the one sent before it, so that the trainer keeps
the order, whatever the network does. A hole in the sequence that nobody fills fails what waits
behind it. When the run ends, all that has not ended fails with the run's error.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections.abc import Awaitable, Callable
from typing import Protocol

from gateway.futures.table import Outcome, Waiting
from gateway.limits.ledger import Rate
from gateway.runs.gaps import SequenceGaps
from gateway.runs.operations import Operation
from tandem.errors import InternalError, SequenceGap, TandemError
from tandem.telemetry import get_log, log_context

_WINDOW_BYTES = 32 * 2**20
"""Of payloads under way to one trainer, which are in memory; more only for a single one."""


class Call:
    """One operation on its way. `release` lets the next one go before this one has ended: the
    trainer has answered, and something else (a sampler's load) is still to be done."""

    def __init__(
        self, *, previous_seq_id: int, gradients_incomplete: str, release: Callable[[], None]
    ) -> None:
        self.previous_seq_id = previous_seq_id
        self.gradients_incomplete = gradients_incomplete
        self.release = release
        self.waiting_for = "the trainer is at work on it"


Send = Callable[[Call], Awaitable[Outcome]]
"""Brings a prepared operation to the trainer. A user's mistake or a platform's fault is the
outcome; an `EndsRun` that it raises ends the run."""


class Prepare(Protocol):
    """Does all that can fail before the trainer hears of an operation. What it raises is the
    operation's outcome, and the operation is not sent."""

    def __call__(self, operation: Operation, /) -> Awaitable[Send]: ...


class EndsRun(Exception):
    """After this the state of the trainer is unknown, or it is gone."""

    def __init__(self, error: TandemError) -> None:
        super().__init__(error.message)
        self.error = error


class Dispatcher:
    """Durations in seconds. `on_outcome` is told of every operation that ended; `on_broken`
    when an operation ended the run."""

    def __init__(
        self,
        *,
        window: int,
        gap_timeout: float,
        prepare: Prepare,
        on_outcome: Callable[[Operation, Outcome], None],
        on_broken: Callable[[TandemError], None],
        not_ready: Callable[[], str],
    ) -> None:
        self._window = window
        self._gap_timeout = gap_timeout
        self._prepare = prepare
        self._on_outcome = on_outcome
        self._on_broken = on_broken
        self._not_ready = not_ready
        self._waiting: dict[int, Operation] = {}
        self._order: list[int] = []  # the places of what waits, sorted
        self._under_way: dict[int, tuple[Operation, Call, asyncio.Task[None]]] = {}
        self._holding = 0
        self._next = 1
        self._sent = -1  # nothing; 0 is the load that created the run
        self._incomplete = ""
        self._ready = False
        self._ends = Rate()
        self._ended: TandemError | None = None
        self._preparing: Operation | None = None
        self._wake = asyncio.Event()
        self._loop = asyncio.create_task(self._advance(), name="dispatcher")
        self._missing = SequenceGaps()
        self._gap_timer: asyncio.TimerHandle | None = None
        self._gap_since = 0.0
        self._log = get_log()

    @property
    def queued(self) -> int:
        """Operations that have not ended."""
        return len(self._waiting) + len(self._under_way) + (self._preparing is not None)

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def consumed(self, seq_id: int) -> bool:
        """Whether the sequence has passed this place, or something holds it."""
        if seq_id in self._missing:
            return False
        return seq_id < self._next or seq_id in self._waiting

    @property
    def rate(self) -> float:
        """Operations that end in a second, of late."""
        return self._ends.per_second()

    def awaits(self, seq_id: int) -> bool:
        """Whether something waits here, and all of it for this one to arrive."""
        return seq_id == self._next and bool(self._waiting) and seq_id not in self._waiting

    def start(self, *, sent: int = -1) -> None:
        """The trainer is ready. `sent`: what it has been given already, if anything."""
        self._sent = sent
        self._ready = True
        self._wake.set()

    def put(self, operation: Operation) -> None:
        """Takes an operation that is in the log and whose place was free."""
        seq_id = operation.seq_id
        if self._ended is not None:
            self._on_outcome(operation, self._ended)
        elif self._missing.fill(seq_id):
            self._on_outcome(
                operation,
                SequenceGap(
                    f"operation {seq_id} came when those behind it had waited "
                    f"{self._gap_timeout:g} s and failed; it was not carried out"
                ),
            )
        else:
            self._waiting[seq_id] = operation
            insort(self._order, seq_id)
            self._wake.set()
            self._watch_gap()

    def end(self, error: TandemError) -> None:
        """Fails all that has not ended, and all that still comes."""
        if self._ended is not None:
            return
        self._ended = error
        self._cancel_gap_timer()
        self._loop.cancel()
        if self._preparing is not None:
            self._on_outcome(self._preparing, error)
        under_way, self._under_way = self._under_way, {}
        waiting, self._waiting = self._waiting, {}
        order, self._order = self._order, []
        for operation, _call, task in under_way.values():
            task.cancel()
            self._on_outcome(operation, error)
        for seq_id in order:
            self._on_outcome(waiting[seq_id], error)

    def abandon(self) -> None:
        """Stops without telling anybody: the gateway ends, and the next one says what became
        of the operations."""
        self._cancel_gap_timer()
        self._loop.cancel()
        for _operation, _call, task in self._under_way.values():
            task.cancel()

    def describe(self, seq_id: int) -> Waiting:
        """What an operation is waiting for, in words for its client."""
        if not self._ready:
            return Waiting(self._not_ready(), paused=True)
        if seq_id in self._under_way:
            operation, call, _task = self._under_way[seq_id]
            before = sum(1 for other in self._under_way if other < seq_id)
            if before == 0 or call.waiting_for != "the trainer is at work on it":
                return Waiting(f"{call.waiting_for} ({_age(operation)})")
            return Waiting(_ahead(before))
        if self._next not in self._waiting and self._waiting:  # what is being prepared: 0 before
            age = time.monotonic() - self._gap_since
            return Waiting(
                f"operation {self._next}, which comes before, has not arrived ({age:.0f} s)"
            )
        before = bisect_left(self._order, seq_id)  # each of thousands asks now and then
        return Waiting(_ahead(before + len(self._under_way)))

    async def _advance(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (operation := self._next_operation()) is not None:
                self._next += 1
                self._preparing = operation
                try:
                    if operation.refused is not None:
                        raise operation.refused
                    send = await self._prepare(operation)
                except TandemError as error:
                    self._refuse(operation, error)
                except Exception as error:  # noqa: BLE001 - a fault of ours must not hang the client
                    self._log.exception("prepare_failed", kind=operation.kind)
                    self._refuse(operation, InternalError(f"{type(error).__name__}: {error}"))
                else:
                    self._preparing = None
                    self._dispatch(operation, send)
            self._watch_gap()

    def _next_operation(self) -> Operation | None:
        """Takes what may go now."""
        operation = self._waiting.get(self._next)
        if operation is None or not self._ready or self._holding >= self._window:
            return None
        if self._under_way and (operation.alone or not self._has_room_for(operation)):
            return None
        del self._order[0]  # what waits lies behind what was sent
        return self._waiting.pop(self._next)

    def _has_room_for(self, operation: Operation) -> bool:
        under_way = sum(other.size for other, _call, _task in self._under_way.values())
        return under_way + operation.size <= _WINDOW_BYTES

    def _refuse(self, operation: Operation, error: TandemError) -> None:
        self._preparing = None
        if operation.changes_gradients:
            self._incomplete = (
                f"operation {operation.seq_id}, a forward_backward since the last step, was "
                f"refused: {error.message}"
            )
        self._on_outcome(operation, error)

    def _dispatch(self, operation: Operation, send: Send) -> None:
        incomplete = ""
        if operation.kind == "optim_step":
            incomplete, self._incomplete = self._incomplete, ""
        self._holding += 1
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self._holding -= 1
                self._wake.set()

        call = Call(previous_seq_id=self._sent, gradients_incomplete=incomplete, release=release)
        self._sent = operation.seq_id
        task = asyncio.create_task(self._carry_out(operation, call, send))
        self._under_way[operation.seq_id] = (operation, call, task)

    async def _carry_out(self, operation: Operation, call: Call, send: Send) -> None:
        outcome: Outcome
        broken: TandemError | None = None
        with log_context(run_id=operation.run_id, request_id=operation.future.request_id):
            try:
                outcome = await send(call)
            except EndsRun as ending:
                outcome = broken = ending.error
            except TandemError as error:
                outcome = error
            except Exception as error:  # noqa: BLE001 - a fault of ours must not hang the client
                self._log.exception("operation_failed", kind=operation.kind)
                outcome = broken = InternalError(f"{type(error).__name__} in the gateway: {error}")
        if self._ended is not None:
            return
        del self._under_way[operation.seq_id]
        self._ends.note()
        self._on_outcome(operation, outcome)
        if broken is not None:
            self._on_broken(broken)
        call.release()
        self._wake.set()

    def _watch_gap(self) -> None:
        if self._ended is not None or not self._waiting or self._next in self._waiting:
            self._cancel_gap_timer()
        elif self._gap_timer is None:
            self._gap_since = time.monotonic()
            self._gap_timer = asyncio.get_running_loop().call_later(
                self._gap_timeout, self._give_up_gap, self._next
            )

    def _cancel_gap_timer(self) -> None:
        if self._gap_timer is not None:
            self._gap_timer.cancel()
            self._gap_timer = None

    def _give_up_gap(self, hole: int) -> None:
        self._gap_timer = None
        if self._next != hole:  # that one came, and there is another hole by now
            self._watch_gap()
            return
        last = self._order[-1]
        self._missing.add(hole, last, filled=self._waiting)
        self._next = last + 1
        message = (
            f"operation {hole} did not arrive within {self._gap_timeout:g} s, so that those "
            "behind it cannot be carried out in order"
        )
        # Any of them, or the missing one, may have been a forward_backward.
        self._incomplete = message
        waiting, self._waiting = self._waiting, {}
        order, self._order = self._order, []
        for seq_id in order:
            self._on_outcome(waiting[seq_id], SequenceGap(message))


def _ahead(before: int) -> str:
    return f"{before} operation{'' if before == 1 else 's'} before this one"


def _age(operation: Operation) -> str:
    return f"{time.monotonic() - operation.accepted_at:.0f} s"
