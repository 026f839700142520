"""Checks before a job asks for a place. So a job that could not start holds no device.

A fault may pass, for example when somebody installs a package. So the checks repeat, and meanwhile
the fault is the reason of the job's wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tandem.agent.preflight import PreflightCheck
from tandem.errors import WorkerMayRun, WorkerStartFailed, without_paths

PAUSE_SECONDS = 30.0
REPEATS = 5
CHECK_SECONDS = 20.0
"""The time limit of one round of checks."""


class Preflight:
    """`check` makes one round of checks: `Launcher.preflight` with the job's needs and
    `CHECK_SECONDS`. `note` gets the reason of the wait after each round, "" at the end."""

    def __init__(
        self,
        check: Callable[[], Awaitable[tuple[PreflightCheck, ...]]],
        *,
        note: Callable[[str], None],
    ) -> None:
        self._check = check
        self._note = note

    async def find_fault(self) -> str:
        """Return "" after a round without a fault, or the last fault after `REPEATS` repeats.

        Rounds that nobody answers, for example without an agent, do not count."""
        repeats = 0
        while True:
            try:
                faults = [each for each in await self._check() if each.fault]
            except (WorkerStartFailed, WorkerMayRun) as error:
                self._note(error.message)
            else:
                if not faults:
                    self._note("")
                    return ""
                reason = reason_of(faults[0])
                if repeats == REPEATS:
                    return reason
                repeats += 1
                self._note(f"{reason}; checked again every {PAUSE_SECONDS:g} s")
            await asyncio.sleep(PAUSE_SECONDS)


def reason_of(fault: PreflightCheck) -> str:
    """Return a sentence with code and type. Example: `the job cannot start (10 package_missing):
    trl: not installed: …`."""
    return without_paths(f"the job cannot start ({fault.code} {fault.fault}): {fault}")
