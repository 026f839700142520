"""The life of a job: its worker gets a place, runs its attempts, and leaves a result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import update

from gateway.jobs.files import read_end, was_begun, write_request
from gateway.jobs.job import Job, training_of
from gateway.jobs.preflight import CHECK_SECONDS, find_fault, needs_of
from gateway.jobs.progress import JobProgress
from gateway.jobs.results import ResultImporter
from gateway.owners.usage.meter import Subject, UsageMeter
from gateway.runs.record.rows import RunRecords
from gateway.runs.record.store import RecordStore
from gateway.storage.database import Database
from gateway.storage.drivers import typed
from gateway.storage.tables import jobs
from gateway.workers.groups import WorkerGroup
from gateway.workers.job_adapter import JobAdapter
from gateway.workers.launchers.base import Launcher
from gateway.workers.model_sizes import read_ahead
from gateway.workers.request_maker import RequestMaker
from gateway.workers.requests import WorkerRequest
from gateway.workers.supervisor import Supervisor
from gateway.workers.table import WorkerRow
from tandem.backends.jobs import STOPPED, JobEnd
from tandem.backends.registry import job_backend
from tandem.backends.rendering import configure, job_paths, render_job
from tandem.errors import JobFailed, StorageFailed, WorkerStartFailed, describe, without_paths
from tandem.log_lines import LogFilter, read_log_lines
from tandem.protocol.worker import JobSpec, WorkerSpec
from tandem.settings.gateway import GatewaySettings
from tandem.telemetry import get_log

_POLL = 1.0
"""Seconds between two looks at a job's metrics."""
_METERED = 5.0
"""Seconds between two notes of its use."""
_REPEAT = 5.0
"""Seconds until work is repeated that the storage refused."""
_LAST_LINES = 8

Result = TypeVar("Result")


class AttemptFailed(Exception):
    """An attempt ended without success, so that its worker's next start waits longer."""

    def __init__(self, end: JobEnd) -> None:
        self.end = end


def request_of(job: Job) -> WorkerRequest:
    """Return the request for a job's worker. It takes its devices whole."""
    return WorkerRequest(
        key=job.run_id,
        kind="job",
        owner=job.owner,
        session=job.session_id,
        model=job.model.path,
        ranks=job.plan.processes,
        host_bytes=job.plan.host_memory,
        groups=(job.plan.group,) if job.plan.group else (),
        priority=job.plan.priority,
    )


def job_spec(job: Job, group: WorkerGroup) -> JobSpec:
    """Render the present attempt of a job for a group. Raises `FrameworkMissing`, and errors of a
    backend that has changed since the submission."""
    backend = job_backend(job.plan.backend)
    configuration = configure(backend, job.plan.configuration)
    paths = job_paths(
        backend, folder=str(job.folder), model=job.model.path, frameworks=group.frameworks
    )
    spec = render_job(backend, configuration, paths, job.plan.processes)
    return spec.model_copy(update={"attempt": job.attempt})


@dataclass(eq=False)
class _JobOwner:
    """Describes the processes of a job. An attempt has one."""

    job: Job

    def specification(self, row: WorkerRow, group: WorkerGroup) -> WorkerSpec:
        job = self.job
        if job.begun == job.attempt:
            raise WorkerStartFailed("its attempt has ended")
        job.begun = job.attempt
        return WorkerSpec(
            worker_id="",
            secret="",
            kind="job",
            session_id=job.session_id,
            model_name=job.model.name,
            model_path=job.model.path,
            run_id=job.run_id,
            job=job_spec(job, group),
        )


@dataclass(eq=False, kw_only=True)
class JobLife:
    settings: GatewaySettings
    database: Database
    supervisor: Supervisor
    launcher: Launcher
    adapter: JobAdapter
    requests: RequestMaker
    record: RecordStore
    records: RunRecords
    usage: UsageMeter
    results: ResultImporter

    def __post_init__(self) -> None:
        self._log = get_log()

    async def follow(self, job: Job) -> None:
        """Return when the job's result is imported. Raises `JobFailed`, `CheckpointDamaged`,
        `LimitExceeded`, or the error of a request for a place."""
        self.adapter.register(job.run_id, _JobOwner(job))
        progress = JobProgress(job, record=self.record, records=self.records)
        while (end := await self._attempt(job, progress)).status != 0:
            failed = end.status != STOPPED  # a drain or a stop is no failure
            if failed and job.restarts >= job.plan.max_restarts:
                raise JobFailed(await self._why_failed(job, end))
            self._log.warning(
                "job_restarted", run_id=job.run_id, attempt=job.attempt, reason=end.reason
            )
            attempt, restarts = job.attempt + 1, job.restarts + failed
            queued = partial(self._note, job, state="queued", attempt=attempt, restarts=restarts)
            await self._stored(job, queued)
            job.attempt, job.restarts = attempt, restarts
            job.note_reason(f"attempt {attempt - 1} has ended: {end.reason}")
        await self._stored(job, lambda: self.release(job))  # others may have its devices now
        await self._stored(job, lambda: self.results.import_result(job))

    async def prepare_request(self, job: Job) -> WorkerRequest:
        """Return the request for a job's worker with its memory. Raises `InvalidRequest` if the
        launcher needs the size of the model, and cannot read it."""
        await read_ahead(job.model.path, self.settings)
        return self.requests.job(request_of(job), training_of(job.plan.configuration))

    async def release(self, job: Job) -> None:
        """Return when nothing is left of the job's worker."""
        self.adapter.unregister(job.run_id)
        await self.supervisor.release(job.run_id, holder=job.run_id)

    # --- Attempts -----------------------------------------------------------------------------

    async def _attempt(self, job: Job, progress: JobProgress) -> JobEnd:
        """Return the end of the present attempt, perhaps of one that an earlier gateway began."""
        key = job.run_id
        self.supervisor.watch_ends(key, job.note_exit)
        await self.supervisor.await_found([key])
        row = self.supervisor.roster.rows.get(key)
        if ran := row is not None and row.has_process:
            job.begun = job.attempt
        elif await asyncio.to_thread(was_begun, job):
            await self._stored(job, progress.read_on)
            return await self._end_of(job, JobEnd(status=STOPPED, reason="no gateway saw its end"))
        else:
            await self._stored(job, lambda: asyncio.to_thread(write_request, job))
            await self._pass_preflight(job)
            request = await self.prepare_request(job)
            await self._stored(job, lambda: self.supervisor.place([request], holder=key))
            self.supervisor.watch_ends(key, job.note_exit)
        job.note_reason("")
        try:
            while True:  # in turns
                async with self.supervisor.use(key) as row:
                    ran = True
                    await self._stored(job, lambda: self._note(job, state="running"))
                    reason = await self._watch(job, row.process, progress)
                    if reason is None:
                        continue
                    end = await self._end_of(job, JobEnd(status=1, reason=reason))
                    if end.status != 0:
                        raise AttemptFailed(end)
                    return end
        except AttemptFailed as failed:
            return failed.end
        except WorkerStartFailed as error:
            await self._stored(job, progress.read_on)
            if ran:  # the job did not fail: it ended without its devices
                self.supervisor.roster.calls_of(key).keeps_devices = True
            status = STOPPED if ran else 1
            return await self._end_of(job, JobEnd(status=status, reason=error.message))

    async def _pass_preflight(self, job: Job) -> None:
        """Wait until the job could start, without a place. Raises `JobFailed`."""
        job.note_reason("the checks before its start run")
        groups = self.supervisor.roster.groups.values()
        needs = needs_of(
            job,
            [group for group in groups if group.suits(request_of(job))],
            disk_bytes=self.settings.min_free_bytes,
        )
        check = partial(self.launcher.preflight, needs, timeout=CHECK_SECONDS)
        if fault := await find_fault(check, note=job.note_reason):
            raise JobFailed(fault)

    async def _watch(self, job: Job, process: str, progress: JobProgress) -> str | None:
        """Follow a process. Return the reason for its end, or None if it must yield."""
        noted = time.monotonic()
        while True:
            job.exited.clear()
            gone = process in job.exits
            yields = self.supervisor.roster.calls_of(job.run_id).yielding
            await self._stored(job, progress.read_on)
            now = time.monotonic()
            if gone or yields or now - noted >= _METERED:
                self._meter(job, now - noted)
                noted = now
            if gone:
                return job.exits[process]
            if yields:
                await self._stored(job, lambda: self._note(job, state="queued"))
                if process not in job.exits:
                    return None
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL):
                    await job.exited.wait()

    async def _end_of(self, job: Job, otherwise: JobEnd) -> JobEnd:
        """Return the end of an attempt in its file, or another one without that."""
        try:
            return await asyncio.to_thread(read_end, job) or otherwise
        except (OSError, ValueError) as error:
            return JobEnd(status=1, reason=without_paths(describe(error)))

    async def _why_failed(self, job: Job, end: JobEnd) -> str:
        """Return a sentence with the last lines of the log."""
        times = f"{job.attempt} attempts" if job.attempt > 1 else "its attempt"
        wanted = LogFilter(run=job.run_id, level="error")
        folder = self.settings.data_dir / "logs"
        lines, _ = await asyncio.to_thread(read_log_lines, folder, wanted, limit=_LAST_LINES)
        own = [line.text for line in lines if line.log.startswith("job-")]
        last = f". The last lines of its log: {' | '.join(own)}" if own else ""
        return without_paths(f"the job failed after {times}: {end.reason}{last}")

    # --- Small parts --------------------------------------------------------------------------

    def _meter(self, job: Job, seconds: float) -> None:
        subject = Subject(
            id=job.run_id,
            session_id=job.session_id,
            owner=job.owner,
            base_model=job.model.name,
            run_id=job.run_id,
        )
        self.usage.record("job", subject, accelerator_seconds=seconds * job.plan.processes)

    async def _note(self, job: Job, **values: Any) -> None:
        """Change a job's row."""
        change = update(jobs).where(jobs.c.run_id == job.run_id).values(values)
        await self.database.write(change, durable="attempt" in values)

    async def _stored(self, job: Job, work: Callable[[], Awaitable[Result]]) -> Result:
        """Repeat work while the storage fails. Meanwhile that is the reason of the job's wait."""
        reason: str | None = None
        while True:
            try:
                result = await work()
            except (StorageFailed, OSError) as error:
                reason = describe(error if isinstance(error, StorageFailed) else typed(error))
                self._log.error("job_waits_for_storage", run_id=job.run_id, reason=describe(error))
                job.note_reason(reason)
                await asyncio.sleep(_REPEAT)
            else:
                if job.reason == reason:
                    job.note_reason("")
                return result
