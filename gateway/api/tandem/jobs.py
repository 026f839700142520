"""Jobs: whole trainings of other frameworks. Each is a run too, and is stopped as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, Field

from gateway.api.dependencies import Access, AccessDep
from gateway.api.fields import Answer, Limit, Offset, PathText, Time, WholeNumber
from gateway.api.request_body import FILES_BODY
from gateway.api.routing import Router
from gateway.api.tandem.runs import RunProgress, own_run, summaries_of
from gateway.identifiers import LONGEST_TTL, unknown_run
from gateway.jobs.files import job_folder, read_world
from gateway.jobs.job import JobPlan
from gateway.jobs.registry import JobRecord
from gateway.jobs.results import result_paths
from gateway.runs.record.rows import RunFilters, RunRecord
from gateway.workers.schedule import WaitReason
from tandem.errors import BudgetExhausted, StorageFailed, StorageFull, UnknownModel, UnknownRun

FILES_TTL = 7 * 86_400
"""The usual seconds that the files of an ended job stay."""

router = Router("/api/tandem/v1", tag="Tandem")


class JobTexts(BaseModel):
    """JSON lines: one object in each line, in the format of the method."""

    train: str
    eval: str = ""


class SubmitJob(BaseModel):
    """`backend` is a job backend, such as `trl`, and `configuration` has its settings. `group` is
    a device group for trainers. `host_memory` is the memory of the job's pod, such as "24GiB",
    instead of an estimate. `deadline` is a number of seconds from now, or a moment with its
    time zone. A job that fails starts again up to `max_restarts` times. Its files stay for
    `ttl_seconds` after its end. Only administrators may give a `priority` above 0."""

    backend: Annotated[str, Field(max_length=64)]
    model: Annotated[str, Field(max_length=200)]
    configuration: dict[str, Any]
    data: JobTexts
    name: str | None = None
    tags: list[str] = []
    processes: Annotated[WholeNumber, Field(ge=1, le=1024)] = 1
    group: Annotated[str, Field(max_length=100)] = ""
    host_memory: Annotated[str, Field(max_length=100)] = ""
    priority: Annotated[int, Field(ge=-10, le=10)] = 0
    max_restarts: Annotated[WholeNumber, Field(le=100)] = 0
    deadline: Annotated[str, Field(max_length=100)] = ""
    ttl_seconds: Annotated[WholeNumber, Field(le=LONGEST_TTL)] = FILES_TTL


class JobResult(Answer):
    """The paths of the trained weights: for a trainer, and for samplers."""

    weights: str
    sampler_weights: str


class JobInfo(Answer):
    """A job is a run with the same id. `queue_position` counts from 1, and is 0 in no queue. It has
    waited for `waited_seconds`, for the `reason`. `attempt` counts from 1, and `restarts` counts
    failed attempts. `result` is null without one."""

    id: str
    name: str
    tags: list[str]
    owner: str
    base_model: str
    backend: str
    framework: str
    configuration: dict[str, Any]
    processes: int
    state: str
    reason: str
    queue_position: int
    waited_seconds: float
    attempt: int
    restarts: int
    max_restarts: int
    created_at: Time
    ended_at: Time | None
    files_until: Time | None
    progress: RunProgress | None
    last: dict[str, float | str]
    result: JobResult | None


class JobDetails(JobInfo):
    """`world` has what each rank of the present attempt says about itself: its `rank`, the
    `world_size`, and the `sha256` of its rows of data."""

    world: list[dict[str, Any]]


class JobInfos(Answer):
    jobs: list[JobInfo]
    total_count: int


@router.operation(
    "POST",
    "/jobs",
    role="member",
    audit="job_create",
    errors=[UnknownModel, BudgetExhausted, StorageFailed, StorageFull],
    rules=[
        "`backend` must be an installed job backend, and `configuration` fit it and the devices.",
        "Each row of `data` must have the columns of the method. The error names the line.",
        "Some group must have a device for each process.",
    ],
    bounds=FILES_BODY,
)
async def create_job(body: SubmitJob, access: AccessDep) -> JobInfo:
    """Submit a job, and return it as soon as it is durable. `POST /runs/ID/stop` stops it."""
    job = await access.gateway.job_submission.submit(
        JobPlan(
            backend=body.backend,
            configuration=body.configuration,
            processes=body.processes,
            group=body.group,
            priority=body.priority,
            max_restarts=body.max_restarts,
            ttl=body.ttl_seconds,
        ),
        model=body.model,
        data=body.data.model_dump(),
        name=body.name or None,
        tags=body.tags or None,
        deadline=body.deadline,
        host_memory=body.host_memory,
        owner=access.caller.owner,
        admin=access.caller.role == "admin",
    )
    access.audit.note(job.run_id, backend=body.backend, base_model=body.model)
    [about] = await _described([await own_run(job.run_id, access)], access)
    return about


@router.operation("GET", "/jobs", role="reader", overseen=True)
async def list_jobs(
    access: AccessDep,
    limit: Annotated[Limit, Query()] = 20,
    offset: Annotated[Offset, Query()] = 0,
) -> JobInfos:
    """Return a page of jobs, newest first. Admins and maintainers see everybody's jobs, others
    their own."""
    found, total = await access.gateway.run_records.runs(
        access.caller,
        scope="accessible",
        filters=RunFilters(only="jobs"),
        limit=limit,
        offset=offset,
    )
    return JobInfos(jobs=await _described(found, access), total_count=total)


@router.operation("GET", "/jobs/{job_id}", role="reader", overseen=True, errors=[UnknownRun])
async def get_job(job_id: PathText, access: AccessDep) -> JobDetails:
    """Describe a job, even after its end."""
    found = await _described([await own_run(job_id, access)], access)
    if not found:
        raise unknown_run(job_id)
    about = found[0]
    folder = job_folder(access.gateway.settings.data_dir, job_id)
    world: list[dict[str, Any]] = []
    with suppress(OSError, ValueError, RecursionError):
        world = await asyncio.to_thread(read_world, folder, about.attempt)
    return JobDetails.of(about, world=world)


async def _described(found: Sequence[RunRecord], access: Access) -> list[JobInfo]:
    """Return the jobs among these runs."""
    records = await access.gateway.jobs.records_of([run.id for run in found])
    runs = [run for run in found if run.id in records]
    summaries = await summaries_of(runs, access)
    return [
        JobInfo.of(summary, **_facts(run, records[run.id], access))
        for run, summary in zip(runs, summaries, strict=True)
    ]


def _facts(run: RunRecord, record: JobRecord, access: Access) -> dict[str, Any]:
    jobs, plan = access.gateway.jobs, record.plan
    live = jobs.find_job(run.id)
    waits = WaitReason(reason=run.reason)
    if live is not None and not run.reason:
        waits = jobs.explain_job(live)
    result = None
    if run.last_training is not None and run.last_sampler is not None:
        weights, sampler = map(str, result_paths(run.id))
        result = JobResult(weights=weights, sampler_weights=sampler)
    return {
        "backend": plan.backend,
        "configuration": plan.configuration,
        "processes": plan.processes,
        "reason": waits.reason,
        "queue_position": waits.position,
        "waited_seconds": round(waits.seconds, 1),
        "attempt": record.attempt,
        "restarts": record.restarts,
        "max_restarts": plan.max_restarts,
        "files_until": record.files_until,
        "result": result,
    }
