"""The dispatcher sends a run's operations to the trainer in `seq_id` order, a few ahead.

The next operation is prepared when it has arrived, its predecessor was sent, and fewer than
`window` are in progress. Each call names its predecessor, so that the trainer keeps the order.
Operations end in order, except while only a sampler works on one. A lasting gap fails the
operations behind it. The run's end fails all unfinished ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from gateway.owners.limits import Rate
from gateway.runs.operations import TRAINER_AT_WORK, Call, Operation, RunBroken
from gateway.storage.futures.table import Outcome, Waiting
from tandem.errors import InternalError, SequenceGap, TandemError
from tandem.telemetry import get_log, log_context

CarryOut = Callable[[Call], Awaitable[Outcome]]


DISPATCH_WINDOW = 4
"""Operations sent ahead. A trainer remembers more results, for repeated operations."""
DISPATCH_WINDOW_BYTES = 32 * 2**20
"""Bytes of operations sent ahead, unless a single one is larger."""
_RECORDED_WITHIN = 10.0
"""Seconds of the waits for weights that are sampled before they are durable."""
GAP_TIMEOUT = 60.0
"""Seconds for which an operation waits for a smaller `seq_id`."""


class Dispatcher:
    """`end` is called once with each operation's outcome. `gap_timeout` is in seconds.
    `window_bytes` bounds the payloads in progress, unless there is only one. While `one_at_a_time`
    is true, no operation is sent ahead."""

    def __init__(
        self,
        *,
        end: Callable[[Operation, Outcome], None],
        one_at_a_time: Callable[[], bool] = lambda: False,
        window: int | None = None,
        window_bytes: int | None = None,
        gap_timeout: float | None = None,
    ) -> None:
        self._window = window or DISPATCH_WINDOW
        self._one_at_a_time = one_at_a_time
        self._window_bytes = window_bytes or DISPATCH_WINDOW_BYTES
        self._gap_timeout = gap_timeout or GAP_TIMEOUT
        self._end = end
        self._waiting: dict[int, Operation] = {}
        self._under_way: dict[int, Call] = {}
        self._next = 1
        self._sent = -1
        self._incomplete = ""
        self._ready = False
        self._created_at = time.monotonic()
        self._completions = Rate()
        self._refusal: TandemError | None = None
        self._ended: TandemError | None = None
        self._wake = asyncio.Event()
        self._call_ended = asyncio.Event()
        self._gap_since: float | None = None
        self._drained: asyncio.Future[None] | None = None
        self._log = get_log()

    @property
    def queued(self) -> int:
        return len(self._waiting) + len(self._under_way)

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    @property
    def first(self) -> Call | None:
        """The first call in progress, preferring calls that the trainer works on."""
        calls = self._under_way.values()
        waiting = [call for call in calls if not call.released] or calls
        return min(waiting, key=lambda call: call.operation.seq_id, default=None)

    @property
    def sent(self) -> int:
        """The last `seq_id` that the trainer received, or -1."""
        return self._sent

    @property
    def rate(self) -> float:
        return self._completions.per_second()

    def passed(self, seq_id: int) -> bool:
        """Return whether the turn of this `seq_id` is over."""
        return seq_id < self._next

    def awaits(self, seq_id: int) -> bool:
        """Return whether waiting operations need this one to arrive."""
        return seq_id == self._next and self._gap_since is not None

    def put(self, operation: Operation) -> None:
        seq_id = operation.seq_id
        if error := self._ended or self._refusal:
            self._end(operation, error)
        elif self.passed(seq_id):
            self._end(
                operation,
                SequenceGap(
                    f"operation {seq_id} was not carried out: it came after later operations had "
                    f"waited {self._gap_timeout:g} s for it and failed"
                ),
            )
        else:
            self._waiting[seq_id] = operation
            self._note_gap()
            self._wake.set()

    def resume(
        self, operations: Sequence[Operation], *, ended: int, gradients_incomplete: str
    ) -> None:
        """Continue after another dispatcher, whose operations up to `ended` have ended. Only a
        sampler works on the earlier ones in `operations`."""
        self._next, self._incomplete = max(ended, 0) + 1, gradients_incomplete
        for operation in operations:
            if operation.seq_id > ended or not operation.folder:
                self.put(operation)
            else:
                call = Call(operation, wake=self._wake, sent=True, answered=True, released=True)
                call.begin()
                self._under_way[operation.seq_id] = call

    async def serve(self, carry_out: CarryOut, *, sent: int = -1) -> NoReturn:
        """Carry out operations until cancelled. `sent` is the last `seq_id` that the trainer
        received, or -1. Raises `RunBroken` if an operation ended the run."""
        self._sent = sent
        self._ready = True
        self._gap_since = None  # gaps count from now on
        try:
            async with asyncio.TaskGroup() as calls:
                for resumed in self._under_way.values():
                    calls.create_task(self._carry_out(carry_out, resumed))
                while True:
                    while (call := self._take_next()) is not None:
                        calls.create_task(self._carry_out(carry_out, call))
                    if first := self.first:
                        first.begin()
                    self._note_drained()
                    await self._wait()
        except ExceptionGroup as broken:
            raise broken.exceptions[0] from None

    def refuse(self, error: TandemError) -> None:
        """Fail the waiting and all later operations. Those in progress go on."""
        self._refusal = error
        for operation in self._take_all():
            self._end(operation, error)

    async def drain(self) -> None:
        """Start no further operation and wait for the trainer's current ones."""
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_future()
        self._note_drained()
        self._wake.set()  # no gap is given up any more
        await asyncio.shield(self._drained)

    @property
    def _at_work(self) -> bool:
        return any(not call.released for call in self._under_way.values())

    def _note_drained(self) -> None:
        if self._drained is not None and not self._drained.done() and not self._at_work:
            self._drained.set_result(None)

    def end(self, error: TandemError) -> None:
        """Fail all unfinished and later operations. The caller cancels `serve`."""
        if self._ended is not None:
            return
        self._ended = error
        under_way, self._under_way = self._under_way, {}
        for operation in [call.operation for call in under_way.values()] + self._take_all():
            self._end(operation, error)
        self._call_ended.set()

    async def until_recorded(self) -> None:
        """Wait until the journal has the outcomes that clients have already, unless a disk stands
        still."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_RECORDED_WITHIN):
                while any(call.operation.future.unrecorded for call in self._under_way.values()):
                    self._call_ended.clear()
                    await self._call_ended.wait()

    def describe(self, seq_id: int) -> Waiting:
        now = time.monotonic()
        if not self._ready:
            return Waiting(f"the trainer is starting ({now - self._created_at:.0f} s)", paused=True)
        if (call := self._under_way.get(seq_id)) is not None:
            before = sum(other < seq_id for other in self._under_way)
            if before == 0 or call.released or call.waiting_for != TRAINER_AT_WORK:
                return Waiting(call.describe(), paused=call.is_paused())
        elif self._gap_since is not None:
            return Waiting(
                f"operation {self._next}, which comes before, has not arrived "
                f"({now - self._gap_since:.0f} s)"
            )
        else:
            before = min(seq_id - self._next, len(self._waiting)) + len(self._under_way)
        reason = f"{before} operation{'' if before == 1 else 's'} before this one"
        return Waiting(f"{reason}; {first.describe()}" if (first := self.first) else reason)

    def _take_next(self) -> Call | None:
        operation = self._waiting.get(self._next)
        calls = self._under_way.values()
        if operation is None or self._drained is not None:
            return None
        window = 1 if self._one_at_a_time() else self._window
        if sum(not call.released for call in calls) >= window:
            return None
        if not all(call.sent for call in calls):
            return None
        size = operation.size + sum(call.operation.size for call in calls)
        if calls and (operation.is_exclusive or size > self._window_bytes):
            return None
        del self._waiting[self._next]
        self._next += 1
        call = Call(operation, previous_seq_id=self._sent, wake=self._wake)
        self._sent = operation.seq_id
        if operation.changes_state:  # the others are not replayed
            call.gradients_incomplete, self._incomplete = self._incomplete, ""
        elif operation.kind == "save_weights":  # complete saves serve as snapshots
            call.gradients_incomplete = self._incomplete
        self._under_way[operation.seq_id] = call
        return call

    def _take_all(self) -> list[Operation]:
        waiting, self._waiting = self._waiting, {}
        self._gap_since = None
        return [waiting[seq_id] for seq_id in sorted(waiting)]

    async def _carry_out(self, carry_out: CarryOut, call: Call) -> None:
        operation = call.operation
        outcome: Outcome
        broken: RunBroken | None = None
        with log_context(run_id=operation.run_id, request_id=operation.future.request_id):
            try:
                outcome = operation.refused or await carry_out(call)
            except RunBroken as error:
                broken, outcome = error, error.error
            except TandemError as error:
                outcome = error
            except Exception as error:  # noqa: BLE001 - a fault of ours must not hang the client
                self._log.exception("operation_failed", kind=operation.kind)
                outcome = InternalError(f"{type(error).__name__} in the gateway; see its log")
                # The trainer's state is unknown only until it has answered.
                broken = RunBroken(outcome) if call.sent and not call.answered else None
            if not call.sent:
                await call.begun  # earlier ones end first
        if self._ended is not None:
            return
        del self._under_way[operation.seq_id]
        if not call.sent:
            self._take_back(call, outcome)
        self._completions.note()
        self._end(operation, outcome)
        self._call_ended.set()
        if broken is not None:
            raise broken
        self._wake.set()

    def _take_back(self, call: Call, outcome: Outcome) -> None:
        self._sent = call.previous_seq_id
        self._incomplete = self._incomplete or call.gradients_incomplete
        if call.operation.kind == "forward_backward" and isinstance(outcome, TandemError):
            self._incomplete = why_refused(call.operation.seq_id, outcome.message)

    async def _wait(self) -> None:
        self._note_gap()
        self._wake.clear()
        if self._gap_since is None:
            await self._wake.wait()
            return
        try:
            left = self._gap_since + self._gap_timeout - time.monotonic()
            async with asyncio.timeout(left):
                await self._wake.wait()
        except TimeoutError:
            if self._gap_since is not None:  # not filled meanwhile
                self._give_up_gap()

    def _note_gap(self) -> None:
        """Note when operations began to wait for a missing one and nothing else."""
        waits = self._waiting and self._next not in self._waiting and self._drained is None
        if not waits or self._at_work:
            self._gap_since = None
        elif self._gap_since is None:
            self._gap_since = time.monotonic()

    def _give_up_gap(self) -> None:
        message = (
            f"operation {self._next} did not arrive within {self._gap_timeout:g} s, so later "
            "operations cannot be carried out in order; send them again"
        )
        # The missing one may be a forward_backward.
        self._incomplete = message
        self._next = max(self._waiting) + 1
        for operation in self._take_all():
            self._end(operation, SequenceGap(message))


def why_refused(seq_id: int, reason: str) -> str:
    return f"operation {seq_id}, a forward_backward since the last step, was refused: {reason}"
