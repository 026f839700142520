"""Training runs and their optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import BaseModel, Field

from gateway.api.dependencies import Access, AccessDep
from gateway.api.fields import Answer, Limit, Offset, Omitted, PathText, Time, UserMetadata
from gateway.api.routing import Router
from gateway.api.tandem.samplers import EngineCounts
from gateway.identifiers import unknown_run
from gateway.runs.record.events import EventKind, run_events
from gateway.runs.record.identity import identity_changes
from gateway.runs.record.progress import RecordIndex
from gateway.runs.record.rows import RunFilters, RunRecord, TrainingStep
from tandem.errors import UnknownRun
from tandem.v1 import trainer_pb2

router = Router("/api/tandem/v1", tag="Tandem")
Filter = Annotated[str | Omitted, Field(max_length=200)]


class StepInfo(Answer):
    """An optimizer step. `seconds` is the trainer's time, batches included. `tokens` counts the
    batches' tokens. `weight_version` is the newest version before the step. `metrics` come from the
    optimizer and the batches, combined as their suffixes say. Names without a suffix belong to the
    whole step, and `seconds/NAME` says where its time went."""

    step: int
    seq_id: int
    at: Time
    seconds: float
    tokens: int
    weight_version: str
    metrics: dict[str, float | None]


class RunProgress(Answer):
    """The newest step of the user's metrics, or of the optimizer without any. `percent` and
    `eta_seconds` need `total_steps` in the run's configuration."""

    step: int
    total_steps: int | None
    percent: float | None
    eta_seconds: float | None
    last_updated_at: Time


class RunSummary(Answer):
    """`parent_run` is the run whose checkpoint this one loaded, at its step `parent_step`. Later
    steps count on from there. `progress` is null before the first step. `last` has the newest value
    of each metric; NaN and infinities are text. `replicas` is the number of model copies on the
    trainer's `ranks`. `tensor_parallel` is the number of ranks that compute one datum together.
    `last_step` is null before the first optimizer step. `framework` is that of a job, whose `state`
    is queued, running, ending or ended. It is empty for a run of Tandem's trainer."""

    id: str
    session_id: str
    owner: str
    project_id: str
    base_model: str
    framework: str
    lora_rank: int | None
    ranks: int
    replicas: int
    tensor_parallel: int
    state: str
    reason: str
    created_at: Time
    ended_at: Time | None
    last_step: StepInfo | None
    name: str
    tags: list[str]
    parent_run: str | None
    parent_step: int | None
    progress: RunProgress | None
    last: dict[str, float | str]


class RunDetails(RunSummary):
    config: dict[str, Any] | None
    user_metadata: UserMetadata


class RunChange(BaseModel):
    """Absent fields stay. An empty name or list, and null, remove. `user_metadata` changes only its
    keys, and null removes a key."""

    name: str | None = None
    tags: list[str] | None = None
    config: dict[str, Any] | None = None
    user_metadata: dict[str, str | None] | None = None


class RunSummaries(Answer):
    runs: list[RunSummary]
    total_count: int


class RunMemory(Answer):
    """The plan with which a run's trainer started. `micro_batch_tokens` is the largest micro-batch.
    `checkpointing`: blocks keep only their input. `device` and `host` map each use to its bytes per
    rank on the GPU and the host. For CPU ranks, all bytes are in `device`."""

    micro_batch_tokens: int
    checkpointing: bool
    device: dict[str, int]
    device_available: int
    host: dict[str, int]
    host_available: int


class PublishedVersion(Answer):
    name: str
    bytes: int


class RunSteps(Answer):
    """`published` is the run's last version since the gateway started, or null. `memory` is null
    without a trainer or its plan, and `engines` without engines. `before` fetches the preceding
    steps, null if there are none."""

    run: RunSummary
    published: PublishedVersion | None
    memory: RunMemory | None
    engines: EngineCounts | None
    steps: list[StepInfo]
    before: int | None


class RunEventInfo(Answer):
    """`event` happened to `worker`: to the run's trainer or job, an engine of its session, or the
    run itself. A trainer that starts again restores the run. A worker that moved is on another
    `group` than before. `key` names the worker."""

    at: Time
    event: EventKind
    worker: Literal["trainer", "engine", "job", "run"]
    key: str
    group: str
    reason: str


class RunEvents(Answer):
    events: list[RunEventInfo]


@router.operation("GET", "/runs", role="reader", overseen=True)
async def list_runs(
    access: AccessDep,
    limit: Annotated[Limit, Query()] = 20,
    offset: Annotated[Offset, Query()] = 0,
    name: Annotated[Filter, Query()] = None,
    tag: Annotated[Filter, Query()] = None,
    state: Annotated[Filter, Query()] = None,
    owner: Annotated[Filter, Query()] = None,
) -> RunSummaries:
    """Return a page of runs, newest first. Admins and maintainers see everybody's runs, others
    their own. `name` is a part of the name, in any case."""
    found, total = await access.gateway.run_records.runs(
        access.caller,
        scope="accessible",
        filters=RunFilters(name=name, tag=tag, state=state, owner=owner),
        limit=limit,
        offset=offset,
    )
    return RunSummaries(runs=await summaries_of(found, access), total_count=total)


@router.operation("GET", "/runs/{run_id}", role="reader", overseen=True, errors=[UnknownRun])
async def get_run(run_id: PathText, access: AccessDep) -> RunDetails:
    """Describe a run, even after its end."""
    run = await own_run(run_id, access)
    [summary] = await summaries_of([run], access)
    return RunDetails.of(summary, config=run.identity.config, user_metadata=run.user_metadata)


@router.operation(
    "PATCH",
    "/runs/{run_id}",
    role="ci",
    audit="run_change",
    errors=[UnknownRun],
    rules=[
        "The name, the tags and the configuration have limits. `user_metadata` cannot change the "
        "keys of the identity, or those that begin with `tandem`."
    ],
)
async def change_run(run_id: PathText, body: RunChange, access: AccessDep) -> RunDetails:
    """Change a run's name, tags, configuration or other metadata, even after its end."""
    run = await own_run(run_id, access)
    await access.check_run(run_id)
    given = {name: getattr(body, name) for name in body.model_fields_set}
    changes = identity_changes(given, run.user_metadata)
    if changes:
        await access.gateway.run_records.change(run_id, changes)
        access.gateway.record.identity_files.write_soon(run_id)
    access.audit.note(run_id, changed=", ".join(sorted(changes)))
    return await get_run(run_id, access)


@router.operation("GET", "/runs/{run_id}/steps", role="reader", overseen=True, errors=[UnknownRun])
async def run_steps(
    run_id: PathText,
    access: AccessDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    before: Annotated[Offset | Omitted, Query()] = None,
) -> RunSteps:
    """Return a run's newest optimizer steps in order, or those before a `seq_id`."""
    run = await own_run(run_id, access)
    gateway, records = access.gateway, access.gateway.run_records
    found = await records.newest_steps(run_id, limit=limit + 1, before=before)
    [summary] = await summaries_of([run], access)
    live = gateway.runs.get(run_id)
    published = live.published if live is not None else None
    sampler = gateway.samplers.by_key(live.host.sampler) if live is not None else None
    return RunSteps(
        run=summary,
        published=PublishedVersion.of(published) if published is not None else None,
        memory=_memory(live.about) if live is not None else None,
        engines=EngineCounts.of_sampler(sampler) if sampler is not None else None,
        steps=[StepInfo.of(step) for step in found[-limit:]],
        before=found[1].seq_id if len(found) > limit else None,
    )


@router.operation("GET", "/runs/{run_id}/events", role="reader", overseen=True, errors=[UnknownRun])
async def list_run_events(run_id: PathText, access: AccessDep) -> RunEvents:
    """Return what happened to a run and its workers in the last seven days, in order."""
    run = await own_run(run_id, access)
    found = await run_events(access.gateway.database, run)
    return RunEvents(events=[RunEventInfo.of(event) for event in found])


async def own_run(run_id: str, access: Access) -> RunRecord:
    """Return a fully visible run. A published checkpoint does not show its run's steps. Raises
    `UnknownRun`."""
    run = await access.gateway.run_records.run(run_id, access.caller, scope="accessible")
    if not access.caller.may_see(run.owner):
        raise unknown_run(run_id)
    return run


async def summaries_of(found: Sequence[RunRecord], access: Access) -> list[RunSummary]:
    ids = [run.id for run in found]
    steps = await access.gateway.run_records.last_steps(ids)
    records = await access.gateway.record.summaries(ids)
    return [_summary(run, steps.get(run.id), records[run.id]) for run in found]


def _summary(run: RunRecord, last: TrainingStep | None, record: RecordIndex) -> RunSummary:
    progress = record.progress(run.identity.config)
    lora = run.training.lora
    return RunSummary.of(
        run,
        lora_rank=lora.rank if lora is not None else None,
        replicas=run.training.layout.replicas,
        tensor_parallel=run.training.layout.tensor_parallel,
        last_step=StepInfo.of(last) if last is not None else None,
        name=run.identity.name or "",
        tags=run.identity.tags or [],
        progress=RunProgress.of(progress) if progress is not None else None,
        last=record.last,
    )


def _memory(about: trainer_pb2.DescribeTrainerReply) -> RunMemory | None:
    plan = about.memory
    if not about.HasField("memory"):
        return None
    return RunMemory.of(plan, device=dict(plan.device), host=dict(plan.host))
