"""The dispatcher of one run: gives operations to the trainer in `seq_id` order, a few ahead.

Operations may arrive in any order. The next one is sent as soon as it is there and fewer than
`window` are under way. Each call names the one sent before it, so that the trainer keeps the
order whatever the network does. A gap in the sequence that nobody fills fails the operations
behind it. When the run ends, everything that has not ended fails with the run's error.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import NoReturn, Protocol

from gateway.futures.table import Outcome, Waiting
from gateway.limits import Rate
from gateway.runs.operations import TRAINER_AT_WORK, Call, Operation, Prepared, RunBroken
from tandem.errors import InternalError, SequenceGap, TandemError
from tandem.telemetry import get_log, log_context


class Runner(Protocol):
    """What the dispatcher needs of an `OperationRunner`."""

    async def prepare(self, operation: Operation, /) -> Prepared: ...
    async def carry_out(self, prepared: Prepared, call: Call, /) -> Outcome: ...


class Dispatcher:
    """`end` is called once with the outcome of each operation. `gap_timeout` in seconds;
    `window_bytes` bounds the payloads that are under way, unless there is only one."""

    def __init__(
        self,
        *,
        window: int,
        window_bytes: int,
        gap_timeout: float,
        end: Callable[[Operation, Outcome], None],
    ) -> None:
        self._window = window
        self._window_bytes = window_bytes
        self._gap_timeout = gap_timeout
        self._end = end
        self._waiting: dict[int, Operation] = {}
        self._order: list[int] = []  # the seq_ids of `_waiting`, sorted
        self._preparing: Operation | None = None
        self._under_way: dict[int, tuple[Operation, Call]] = {}
        self._next = 1
        self._sent = -1
        self._incomplete = ""
        self._ready = False
        self._created_at = time.monotonic()
        self._completions = Rate()
        self._ended: TandemError | None = None
        self._wake = asyncio.Event()
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

    @property
    def rate(self) -> float:
        """Recent completions per second."""
        return self._completions.per_second()

    def passed(self, seq_id: int) -> bool:
        """Whether it was the turn of this `seq_id`: an operation had it, or it was given up."""
        return seq_id < self._next

    def awaits(self, seq_id: int) -> bool:
        """Whether operations are waiting, and all of them for this one to arrive."""
        return seq_id == self._next and bool(self._waiting) and seq_id not in self._waiting

    def put(self, operation: Operation) -> None:
        """Take an operation that is in the journal, and of whose `seq_id` there was no other."""
        seq_id = operation.seq_id
        if self._ended is not None:
            self._end(operation, self._ended)
        elif self.passed(seq_id):
            self._end(
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

    async def serve(self, runner: Runner, *, sent: int = -1) -> NoReturn:
        """Carry out operations until cancelled. `sent` is the `seq_id` of what the trainer has
        been given already, or -1. Raises `RunBroken` when an operation ended the run."""
        self._sent = sent
        self._ready = True
        try:
            async with asyncio.TaskGroup() as calls:
                while True:
                    while (operation := self._take_next()) is not None:
                        prepared = await self._prepare(runner, operation)
                        if prepared is not None:
                            self._send(calls, runner, prepared)
                    self._watch_gap()
                    self._wake.clear()
                    await self._wake.wait()
        except ExceptionGroup as broken:
            raise broken.exceptions[0] from None

    def end(self, error: TandemError) -> None:
        """Fail everything that has not ended, and everything that arrives later. Whoever calls
        it cancels `serve`."""
        if self._ended is not None:
            return
        self._ended = error
        self.stop_timer()
        under_way, self._under_way = self._under_way, {}
        waiting, self._waiting = self._waiting, {}
        order, self._order = self._order, []
        if self._preparing is not None:
            self._end(self._preparing, error)
        for operation, _call in under_way.values():
            self._end(operation, error)
        for seq_id in order:
            self._end(waiting[seq_id], error)

    def stop_timer(self) -> None:
        """Stop watching for gaps."""
        if self._gap_timer is not None:
            self._gap_timer.cancel()
            self._gap_timer = None

    def describe(self, seq_id: int) -> Waiting:
        """Say what an operation is waiting for."""
        if not self._ready:
            age = time.monotonic() - self._created_at
            return Waiting(f"the trainer is starting ({age:.0f} s)", paused=True)
        if seq_id in self._under_way:
            operation, call = self._under_way[seq_id]
            before = sum(other < seq_id for other in self._under_way)
            if before == 0 or call.waiting_for != TRAINER_AT_WORK:
                age = time.monotonic() - operation.accepted_at
                return Waiting(f"{call.waiting_for} ({age:.0f} s)")
            return Waiting(_ahead(before))
        if self._next not in self._waiting and self._waiting:
            age = time.monotonic() - self._gap_since
            return Waiting(
                f"operation {self._next}, which comes before, has not arrived ({age:.0f} s)"
            )
        before = bisect_left(self._order, seq_id)
        return Waiting(_ahead(before + len(self._under_way)))

    def _take_next(self) -> Operation | None:
        """Take the next operation if it may go now."""
        operation = self._waiting.get(self._next)
        holding = sum(not call.released for _, call in self._under_way.values())
        if operation is None or holding >= self._window:
            return None
        if self._under_way and (operation.is_exclusive or not self._has_room_for(operation)):
            return None
        self._next += 1
        del self._order[0]
        self._preparing = operation
        return self._waiting.pop(operation.seq_id)

    def _has_room_for(self, operation: Operation) -> bool:
        under_way = sum(other.size for other, _ in self._under_way.values())
        return under_way + operation.size <= self._window_bytes

    async def _prepare(self, runner: Runner, operation: Operation) -> Prepared | None:
        """Return None for an operation that failed and is not sent."""
        try:
            if operation.refused is not None:
                raise operation.refused
            return await runner.prepare(operation)
        except TandemError as error:
            failed = error
        except Exception as error:  # noqa: BLE001 - a fault of ours must not hang the client
            self._log.exception("prepare_failed", kind=operation.kind)
            failed = InternalError(f"{type(error).__name__}: {error}")
        self._preparing = None
        if operation.changes_gradients:
            self._incomplete = (
                f"operation {operation.seq_id}, a forward_backward since the last step, was "
                f"refused: {failed.message}"
            )
        self._end(operation, failed)
        return None

    def _send(self, calls: asyncio.TaskGroup, runner: Runner, prepared: Prepared) -> None:
        operation = prepared.operation
        incomplete = ""
        if operation.kind == "optim_step":
            incomplete, self._incomplete = self._incomplete, ""
        call = Call(previous_seq_id=self._sent, gradients_incomplete=incomplete, wake=self._wake)
        self._sent = operation.seq_id
        self._preparing = None
        self._under_way[operation.seq_id] = (operation, call)
        calls.create_task(self._carry_out(runner, prepared, call))

    async def _carry_out(self, runner: Runner, prepared: Prepared, call: Call) -> None:
        operation = prepared.operation
        outcome: Outcome
        broken: RunBroken | None = None
        with log_context(run_id=operation.run_id, request_id=operation.future.request_id):
            try:
                outcome = await runner.carry_out(prepared, call)
            except RunBroken as error:
                broken, outcome = error, error.error
            except TandemError as error:
                outcome = error
            except Exception as error:  # noqa: BLE001 - a fault of ours must not hang the client
                self._log.exception("operation_failed", kind=operation.kind)
                outcome = InternalError(f"{type(error).__name__} in the gateway: {error}")
                broken = RunBroken(outcome)
        if self._ended is not None:
            return
        del self._under_way[operation.seq_id]
        self._completions.note()
        self._end(operation, outcome)
        if broken is not None:
            raise broken
        self._wake.set()

    def _watch_gap(self) -> None:
        if self._ended is not None or not self._waiting or self._next in self._waiting:
            self.stop_timer()
        elif self._gap_timer is None:
            self._gap_since = time.monotonic()
            self._gap_timer = asyncio.get_running_loop().call_later(
                self._gap_timeout, self._give_up_gap, self._next
            )

    def _give_up_gap(self, missing: int) -> None:
        self._gap_timer = None
        if self._next != missing:  # that one came, and another one is missing by now
            self._watch_gap()
            return
        self._next = self._order[-1] + 1
        message = (
            f"operation {missing} did not arrive within {self._gap_timeout:g} s, so that those "
            "behind it cannot be carried out in order"
        )
        # Any of them, or the missing one, may have been a forward_backward.
        self._incomplete = message
        waiting, self._waiting = self._waiting, {}
        order, self._order = self._order, []
        for seq_id in order:
            self._end(waiting[seq_id], SequenceGap(message))


def _ahead(before: int) -> str:
    return f"{before} operation{'' if before == 1 else 's'} before this one"
