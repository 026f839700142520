"""A gateway that is asked to stop. No process is started."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

from gateway.runs.stopping import Stop, save_runs
from tests.support.virtual_time import run_in_virtual_time


def asked(*numbers: int) -> Stop:
    """A stop that these signals asked for, in turn."""
    stop = Stop()
    for number in numbers:
        stop.ask(number)
    return stop


def test_sigterm_hands_the_workers_over_and_sigint_stops_them():
    assert asked(signal.SIGTERM) == asked() == Stop(hand_over=True)
    assert asked(signal.SIGINT) == asked(signal.SIGTERM, signal.SIGINT) == Stop(hand_over=False)


def test_a_second_sigint_ends_the_waiting_and_a_second_sigterm_changes_nothing():
    stopped, at_once = Stop(hand_over=False), Stop(hand_over=False, at_once=True)
    assert asked(signal.SIGINT, signal.SIGTERM) == stopped
    assert asked(signal.SIGINT, signal.SIGINT) == at_once
    assert asked(signal.SIGINT, signal.SIGINT, signal.SIGTERM) == at_once


class SlowTrainer:
    """A trainer that takes `seconds` to save its run, if it serves."""

    def __init__(self, number: int, seconds: float, *, serves: bool = True) -> None:
        self.run, self.serves = SimpleNamespace(id=f"run-{number}", step=7), serves
        self.saved = False
        self._seconds = seconds

    async def save(self) -> None:
        await asyncio.sleep(self._seconds)
        self.saved = True


def saved(*trainers: Any, timeout: float, interrupted_at: float = 1e9) -> tuple[float, list[str]]:
    """Save the runs. Return the seconds, and the messages meanwhile."""
    said: list[str] = []

    async def scenario() -> float:
        stop, loop = Stop(tell=said.append, hand_over=False), asyncio.get_running_loop()
        loop.call_later(interrupted_at, lambda: stop.ask(signal.SIGINT))
        await save_runs(trainers, stop, timeout=timeout)
        return loop.time()

    return run_in_virtual_time(scenario()), said


def test_runs_are_saved_together_and_nothing_is_said_of_what_is_quick():
    runs = [SlowTrainer(1, 0.1), SlowTrainer(2, 0.3)]
    seconds, said = saved(*runs, timeout=30)
    assert all(run.saved for run in runs)
    assert round(seconds, 1) == 0.3
    assert said == []


def test_it_is_said_what_is_waited_for_and_how_long_it_may_last():
    _, said = saved(SlowTrainer(1, 7), SlowTrainer(2, 0.1), timeout=30)
    assert said == [
        f"1 run is being saved (run-1 at step 7): {waited} s of at most 30 s; interrupt again to "
        "end at once"
        for waited in (1, 6)
    ]
    _, said = saved(*(SlowTrainer(number, 2) for number in range(5)), timeout=30)
    assert said[0].startswith("5 runs are being saved (run-")
    assert " at step 7, 2 more)" in said[0]


def test_the_deadline_cuts_off_what_lasts_longer():
    quick, slow = SlowTrainer(1, 1), SlowTrainer(2, 60)
    seconds, said = saved(quick, slow, timeout=10)
    assert (quick.saved, slow.saved, round(seconds)) == (True, False, 10)
    assert said[-1].startswith("1 run is not saved within 10 s; the next start computes again")


def test_a_second_interrupt_ends_the_waiting():
    run = SlowTrainer(1, 60)
    seconds, said = saved(run, timeout=100, interrupted_at=2)
    assert not run.saved
    assert round(seconds) == 2
    assert "not saved within 2 s" in said[-1]


def test_nothing_is_saved_of_a_run_whose_trainer_does_not_serve_or_without_time():
    assert saved(SlowTrainer(1, 60, serves=False), timeout=30) == (0, [])
    assert saved(SlowTrainer(1, 60), timeout=0) == (0, [])
