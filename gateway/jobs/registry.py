"""The registry of jobs, from their submission or resumption until their end."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.identifiers import run_folder_name
from gateway.jobs.files import folders_of_data, job_folder, remove_files
from gateway.jobs.job import Job, JobPlan
from gateway.jobs.life import JobLife
from gateway.owners.limits import Quotas
from gateway.owners.sessions.registry import SessionRegistry
from gateway.runs.registry import RunRegistry
from gateway.storage.database import from_row
from gateway.storage.tables import jobs, runs
from gateway.workers.schedule import WaitReason
from tandem.errors import DeadlineExceeded, InternalError, TandemError, from_type
from tandem.telemetry import get_log


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A row of `jobs`, also of an ended one. `files_until` is in seconds since 1970, None before
    the end and after the removal of the files."""

    plan: JobPlan
    attempt: int
    restarts: int
    files_until: float | None


@dataclass(eq=False, repr=False, kw_only=True)
class JobRegistry:
    """`end_session_soon` ends the session of a job that has ended."""

    life: JobLife
    runs: RunRegistry
    sessions: SessionRegistry
    limits: Quotas
    end_session_soon: Callable[..., None]

    def __post_init__(self) -> None:
        self._database, self._data_dir = self.life.database, self.life.settings.data_dir
        self._jobs: dict[str, Job] = {}
        self._arriving: Counter[str] = Counter()
        self._log = get_log()

    def all(self) -> list[Job]:
        return list(self._jobs.values())

    def find_job(self, run_id: str) -> Job | None:
        return self._jobs.get(run_id)

    def explain_job(self, job: Job) -> WaitReason:
        """Return why a job waits, "" if it does not."""
        if job.reason:
            return WaitReason(reason=job.reason, seconds=time.time() - job.waits_since)
        return self.life.supervisor.explain(job.run_id) or WaitReason(reason="")

    def count_of(self, owner: str) -> int:
        """Return the number of an owner's jobs, with those that arrive."""
        return self._arriving[owner] + sum(job.owner == owner for job in self._jobs.values())

    @contextmanager
    def arriving(self, owner: str) -> Iterator[None]:
        """Count a job during its submission, so that simultaneous ones keep to the limit. Raises
        `LimitExceeded` or `BudgetExhausted` if the owner may have no further job."""
        used = self.runs.count_of(owner) + self.count_of(owner)
        self.limits.check("runs", owner=owner, used=used)
        self.limits.check_budget(owner)
        self._arriving[owner] += 1
        try:
            yield
        finally:
            self._arriving[owner] -= 1

    async def resume_jobs(self) -> None:
        """Continue the jobs of an earlier gateway. Call it after `resume_runs`."""
        await self._remove_unfinished()
        active = select(runs, jobs).join(jobs, jobs.c.run_id == runs.c.id)
        for row in await self._database.read(active.where(runs.c.state == "active")):
            session = self.sessions.get(row["session_id"])
            if session is None:
                continue
            session.ttl = math.inf
            model = row["model"]
            ended = from_type(row["error_type"], row["reason"]) if row["ending"] else None
            self.begin_job(
                Job(
                    run_id=row["run_id"],
                    session_id=session.id,
                    owner=row["owner"],
                    model=BaseModelEntry(**model | {"path": str(self._data_dir / model["path"])}),
                    plan=JobPlan.model_validate(row["spec"]),
                    folder=job_folder(self._data_dir, row["run_id"]),
                    attempt=row["attempt"],
                    restarts=row["restarts"],
                    error=ended,
                )
            )

    async def records_of(self, run_ids: Sequence[str]) -> dict[str, JobRecord]:
        """Return the rows of those runs that are jobs, by id."""
        rows = await self._database.read(select(jobs).where(jobs.c.run_id.in_(run_ids)))
        return {
            row["run_id"]: from_row(JobRecord, row, plan=JobPlan.model_validate(row["spec"]))
            for row in rows
        }

    def begin_job(self, job: Job) -> None:
        self._jobs[job.run_id] = job
        if job.error is not None:
            job.ending = asyncio.create_task(self._finish(job, job.error))
            return
        job.life = asyncio.create_task(self._live(job), name=f"job-{job.run_id}")
        self._end_if_due(job)

    async def _live(self, job: Job) -> None:
        error: TandemError | None = None
        try:
            await self.life.follow(job)
        except TandemError as failed:
            error = failed
        except Exception as fault:  # noqa: BLE001 - the job must end all the same
            self._log.exception("job_failed", run_id=job.run_id)
            error = InternalError(f"{type(fault).__name__} in the gateway; see its log")
        if job.ending is None:
            job.ending = asyncio.create_task(self._finish(job, error))

    # --- Ends ---------------------------------------------------------------------------------

    def end(self, job: Job, error: TandemError) -> None:
        """Decide that a job ends without a result. Only the first decision counts."""
        if job.ending is not None:
            return
        job.error = error
        self._database.write_soon(
            update(runs)
            .where(runs.c.id == job.run_id, runs.c.state == "active")
            .values(ending="discard", error_type=error.type, reason=error.message)
        )
        job.ending = asyncio.create_task(self._finish(job, error))

    def end_due(self) -> None:
        """Begin the ends of the jobs with a passed deadline or a used-up budget."""
        for job in self.all():
            self._end_if_due(job)

    def _end_if_due(self, job: Job) -> None:
        error: TandemError | None = self.limits.exhausted.get(job.owner)
        if error is None and job.plan.deadline is not None and time.time() >= job.plan.deadline:
            error = DeadlineExceeded("the job has reached its deadline")
        if error is not None:
            self.end(job, error)

    async def wait_for_end(self, job: Job, *, timeout: float) -> None:
        """Wait for the decided end of a job, for at most `timeout` seconds."""
        if job.ending is not None:
            await asyncio.wait([job.ending], timeout=timeout)

    async def end_session(self, session_id: str, error: TandemError) -> list[str]:
        """End a session's jobs. Return their ids when nothing is left of them."""
        ending = [job for job in self.all() if job.session_id == session_id]
        for job in ending:
            self.end(job, error)
        tasks = [job.ending for job in ending if job.ending is not None]
        if tasks:
            await asyncio.wait(tasks)
        return [job.run_id for job in ending]

    async def _finish(self, job: Job, error: TandemError | None) -> None:
        """Stop a job's worker, write the end, and end its session."""
        if job.life is not None:
            if error is not None:
                job.life.cancel()
            await asyncio.gather(job.life, return_exceptions=True)
        try:
            await self.life.release(job)
        except Exception:  # noqa: BLE001 - the supervisor goes on
            self._log.exception("job_not_released", run_id=job.run_id)
        now, reason = time.time(), error.message if error is not None else "the job has finished"
        error_type = error.type if error is not None else ""
        write = self._database.write_soon
        write(
            update(runs)
            .where(runs.c.id == job.run_id)
            .values(state="ended", error_type=error_type, reason=reason, ended_at=now)
        )
        write(
            update(jobs).where(jobs.c.run_id == job.run_id).values(files_until=now + job.plan.ttl)
        )
        self._log.info("job_ended", run_id=job.run_id, reason=reason)
        self._jobs.pop(job.run_id, None)
        self.life.record.identity_files.write_soon(job.run_id)
        self.end_session_soon(job.session_id, state="finished", reason="success", detail=reason)

    async def close(self, *, patience: float) -> None:
        """Stop following. The next gateway continues the jobs, and their ends."""
        tasks: list[asyncio.Task[Any]] = [job.life for job in self.all() if job.life is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if ending := [job.ending for job in self.all() if job.ending is not None]:
            _, late = await asyncio.wait(ending, timeout=patience)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    # --- Files --------------------------------------------------------------------------------

    async def _remove_unfinished(self) -> None:
        """Remove data that an earlier gateway wrote before its end, and not the job's row.

        That gateway cannot write the row any more: the database refuses its epoch. Folders of jobs
        that began stay, because the database may be an older copy."""
        found = await asyncio.to_thread(folders_of_data, self._data_dir)
        rows = await self._database.read(select(jobs.c.run_id)) if found else []
        known = {run_folder_name(row["run_id"]) for row in rows}
        if unfinished := [folder for folder in found if folder.name not in known]:
            for folder in unfinished:
                await asyncio.to_thread(remove_files, folder)
            self._log.info("unfinished_jobs_removed", folders=[each.name for each in unfinished])

    async def remove_old_files(self) -> None:
        """Remove the files of ended jobs after their TTL."""
        old = select(jobs.c.run_id).where(jobs.c.files_until <= time.time())
        for row in await self._database.read(old):
            folder = job_folder(self._data_dir, row["run_id"])
            await asyncio.to_thread(remove_files, folder)
            if folder.exists():
                self._log.error("job_files_not_removed", run_id=row["run_id"])
                continue
            gone = update(jobs).where(jobs.c.run_id == row["run_id"]).values(files_until=None)
            await self._database.write(gone)
