"""The end of a gateway: it leaves its workers to the next one, or saves its runs and stops them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gateway.runs.run import Run
from gateway.runs.trainer import RunTrainer
from tandem.telemetry import get_log

_POLL = 0.1
_TOLD_AFTER = 1.0
_TOLD_EVERY = 5.0
_NAMED = 3


@dataclass
class Stop:
    """How a gateway ends.

    `hand_over`: workers continue for the next gateway, also after a fault. `at_once`: a second
    interrupt skips all waiting. `tell` reports to the user."""

    hand_over: bool = True
    at_once: bool = False
    tell: Callable[[str], None] = lambda sentence: None

    def ask(self, number: int) -> None:
        """Note a signal: SIGTERM from a supervisor that will start another gateway, or SIGINT."""
        if number == signal.SIGINT:
            self.at_once = not self.hand_over
            self.hand_over = False


async def save_runs(trainers: Iterable[RunTrainer], stop: Stop, *, timeout: float) -> None:
    """Let trainers finish their calls and take useful snapshots, for at most `timeout` seconds.
    Report slow runs."""
    serving = [trainer for trainer in trainers if trainer.serves]
    saving = {asyncio.create_task(trainer.save()): trainer.run for trainer in serving}
    clock = asyncio.get_running_loop().time
    began, told_at, pending = clock(), _TOLD_AFTER, set(saving)
    while pending and not stop.at_once and (waited := clock() - began) < timeout:
        if waited >= told_at:
            stop.tell(_waiting_for([saving[task] for task in pending], waited, timeout))
            told_at += _TOLD_EVERY
        _, pending = await asyncio.wait(pending, timeout=min(_POLL, timeout - waited))
    for task in pending:
        task.cancel()
    ended = await asyncio.gather(*saving, return_exceptions=True)
    for fault in ended:
        if isinstance(fault, Exception):  # a replay makes up for it
            get_log().error("run_not_saved", exc_info=fault)
    if pending and timeout:
        stop.tell(
            f"{_number(len(pending))} not saved within {clock() - began:.0f} s; the next "
            "start computes again what came since the last snapshot"
        )


def _waiting_for(runs: list[Run], waited: float, timeout: float) -> str:
    """Example: "1 run is being saved (s-ab:train:0 at step 7): 3 s of at most 30 s; …"."""
    named = [f"{run.id} at step {run.step}" for run in runs[:_NAMED]]
    named += [f"{len(runs) - _NAMED} more"] * (len(runs) > _NAMED)
    return (
        f"{_number(len(runs))} being saved ({', '.join(named)}): {waited:.0f} s of at most "
        f"{timeout:g} s; interrupt again to end at once"
    )


def _number(runs: int) -> str:
    return "1 run is" if runs == 1 else f"{runs} runs are"
