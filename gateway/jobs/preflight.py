"""Checks before a job asks for a place. So a job that could not start holds no device.

A fault may pass, for example when somebody installs a package. So the checks repeat, and meanwhile
the fault is the reason of the job's wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from gateway.jobs.job import Job
from gateway.workers.groups import WorkerGroup
from tandem.agent.preflight import JobNeeds, PreflightCheck
from tandem.backends.registry import job_backend
from tandem.errors import WorkerMayRun, WorkerStartFailed, without_paths

PAUSE_SECONDS = 30.0
REPEATS = 5
CHECK_SECONDS = 20.0
"""The time limit of one round of checks."""


async def find_fault(
    check: Callable[[], Awaitable[tuple[PreflightCheck, ...]]], *, note: Callable[[str], None]
) -> str:
    """Return "" after a round of checks without a fault, or the last fault after `REPEATS` repeats.

    `note` gets the reason of the wait after a faulty round, and "" after the faults have passed.
    Rounds that nobody answers, for example without an agent, do not count."""
    repeats, noted = 0, False
    while True:
        try:
            faults = [each for each in await check() if each.fault]
        except (WorkerStartFailed, WorkerMayRun) as error:
            note(error.message)
        else:
            if not faults:
                if noted:
                    note("")
                return ""
            reason = reason_of(faults[0])
            if repeats == REPEATS:
                return reason
            repeats += 1
            note(f"{reason}; checked again every {PAUSE_SECONDS:g} s")
        noted = True
        await asyncio.sleep(PAUSE_SECONDS)


def reason_of(fault: PreflightCheck) -> str:
    """Return a sentence with code and type. Example: `the job cannot start (10 package_missing):
    trl: not installed: …`."""
    return without_paths(f"the job cannot start ({fault.code} {fault.fault}): {fault}")


def needs_of(job: Job, groups: Iterable[WorkerGroup], *, disk_bytes: int) -> JobNeeds:
    """Return a job's needs on a host. It needs devices if all of its `groups` have them.
    `disk_bytes` must be free."""
    backend = job_backend(job.plan.backend)
    return JobNeeds(
        framework=backend.framework,
        backend=backend.name,
        packages=dict(backend.job_configuration.packages),
        folder=str(job.folder),
        model=job.model.path,
        devices=0 if any(group.on_host for group in groups) else job.plan.processes,
        disk_bytes=disk_bytes,
    )
