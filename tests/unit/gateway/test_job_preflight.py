"""A job's checks before it asks for a place, on a clock that jumps."""

from __future__ import annotations

import asyncio
from itertools import chain, repeat

from gateway.jobs.preflight import PAUSE_SECONDS, REPEATS, find_fault
from tandem.agent.preflight import PreflightCheck
from tandem.errors import WorkerStartFailed
from tests.support.virtual_time import in_virtual_time, now

GOOD = (PreflightCheck("interpreter", "python"),)
MISSING = (*GOOD, PreflightCheck("trl", "not installed", "install trl", "package_missing"))
REASON = "the job cannot start (10 package_missing): trl: not installed: install trl"


class Rounds:
    """Answers with each of `results`, and then with the last one. An error is raised."""

    def __init__(self, *results: object) -> None:
        self._results = chain(results, repeat(results[-1]))
        self.times: list[float] = []
        self.notes: list[tuple[float, str]] = []

    async def check(self) -> tuple[PreflightCheck, ...]:
        self.times.append(now())
        result = next(self._results)
        if isinstance(result, Exception):
            raise result
        return result

    def note(self, reason: str) -> None:
        self.notes.append((now(), reason))

    async def find_fault(self) -> str:
        return await find_fault(self.check, note=self.note)


@in_virtual_time
async def test_a_job_without_a_fault_goes_on_at_once():
    rounds = Rounds(GOOD)
    assert await rounds.find_fault() == ""
    assert (rounds.times, rounds.notes) == ([0], [])


@in_virtual_time
async def test_a_fault_is_the_reason_of_the_wait_within_a_minute():
    rounds = Rounds(MISSING)
    task = asyncio.create_task(rounds.find_fault())
    await asyncio.sleep(59)
    assert rounds.notes[0] == (0, f"{REASON}; checked again every 30 s")
    task.cancel()


@in_virtual_time
async def test_a_fault_that_stays_ends_the_job_after_five_repeats():
    rounds = Rounds(MISSING)
    assert await rounds.find_fault() == REASON
    assert rounds.times == [n * PAUSE_SECONDS for n in range(1 + REPEATS)]


@in_virtual_time
async def test_a_fault_that_is_repaired_lets_the_job_go_on():
    rounds = Rounds(MISSING, MISSING, GOOD)
    assert await rounds.find_fault() == ""
    assert now() == 60
    assert rounds.notes[-1] == (60, "")


@in_virtual_time
async def test_a_job_waits_for_an_absent_agent_and_says_so():
    rounds = Rounds(*[WorkerStartFailed("no agent answers")] * 20, GOOD)
    assert await rounds.find_fault() == ""
    assert rounds.notes[0] == (0, "no agent answers")
    assert now() == 600
