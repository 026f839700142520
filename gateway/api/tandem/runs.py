"""Training runs and their optimizer steps."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query

from gateway.api.dependencies import Access, AccessDep
from gateway.api.fields import Answer, Limit, Offset, Omitted, PathText, Time
from gateway.api.routing import Router
from gateway.api.tandem.samplers import EngineCounts
from gateway.identifiers import unknown_run
from gateway.runs.record.events import EventKind, run_events
from gateway.runs.record.rows import RunRecord, TrainingStep
from gateway.runs.run import Run
from tandem.errors import UnknownRun
from tandem.v1 import trainer_pb2

router = Router("/api/tandem/v1", tag="Tandem")


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


class RunSummary(Answer):
    """`replicas` is the number of model copies on the trainer's `ranks`. `tensor_parallel` is the
    number of ranks that compute one datum together. `last_step` is null before the first step."""

    id: str
    session_id: str
    owner: str
    project_id: str
    base_model: str
    lora_rank: int | None
    ranks: int
    replicas: int
    tensor_parallel: int
    state: str
    reason: str
    created_at: Time
    ended_at: Time | None
    last_step: StepInfo | None


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
    """`bytes` is the size for a reader, `written_bytes` the size on the disk. It is smaller for a
    delta of the version `delta_of`, which is "" for a whole version."""

    version: str
    bytes: int
    written_bytes: int
    delta_of: str


class RunWeights(Answer):
    """`deltas`: versions for the run's own sampler may be deltas. `published` is the last version
    since the gateway started, or null."""

    deltas: bool
    published: PublishedVersion | None


class RunSteps(Answer):
    """`weights` and `memory` are null without a trainer, `memory` also without a plan. `engines` is
    null without engines. `before` fetches the preceding steps, null if there are none."""

    run: RunSummary
    weights: RunWeights | None
    memory: RunMemory | None
    engines: EngineCounts | None
    steps: list[StepInfo]
    before: int | None


class RunEventInfo(Answer):
    """`event` happened to `worker`: to the run's trainer, to an engine of its session, or to the
    run itself. A trainer that starts again restores the run. A worker that moved is on another
    `group` than before. `key` names the worker."""

    at: Time
    event: EventKind
    worker: Literal["trainer", "engine", "run"]
    key: str
    group: str
    reason: str


class RunEvents(Answer):
    events: list[RunEventInfo]


@router.operation("GET", "/runs", role="reader")
async def list_runs(
    access: AccessDep,
    limit: Annotated[Limit, Query()] = 20,
    offset: Annotated[Offset, Query()] = 0,
) -> RunSummaries:
    """Return a page of runs, newest first. An admin sees everybody's runs, others their own."""
    found, total = await access.gateway.run_records.runs(
        access.caller, scope="accessible", project_id=None, limit=limit, offset=offset
    )
    last = await access.gateway.run_records.last_steps([run.id for run in found])
    return RunSummaries(runs=[_summary(run, last.get(run.id)) for run in found], total_count=total)


@router.operation("GET", "/runs/{run_id}/steps", role="reader", errors=[UnknownRun])
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
    last = await records.last_steps([run_id])
    live = gateway.runs.get(run_id)
    sampler = gateway.samplers.by_key(live.host.sampler) if live is not None else None
    return RunSteps(
        run=_summary(run, last.get(run_id)),
        weights=_weights(live) if live is not None else None,
        memory=_memory(live.about) if live is not None else None,
        engines=EngineCounts.of_sampler(sampler) if sampler is not None else None,
        steps=[StepInfo.of(step) for step in found[-limit:]],
        before=found[1].seq_id if len(found) > limit else None,
    )


@router.operation("GET", "/runs/{run_id}/events", role="reader", errors=[UnknownRun])
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


def _summary(run: RunRecord, last: TrainingStep | None) -> RunSummary:
    lora = run.training.lora
    return RunSummary.of(
        run,
        lora_rank=lora.rank if lora is not None else None,
        replicas=run.training.layout.replicas,
        tensor_parallel=run.training.layout.tensor_parallel,
        last_step=StepInfo.of(last) if last is not None else None,
    )


def _weights(run: Run) -> RunWeights:
    published = run.published
    return RunWeights(
        deltas=run.publishes_deltas,
        published=PublishedVersion.of(published) if published is not None else None,
    )


def _memory(about: trainer_pb2.DescribeTrainerReply) -> RunMemory | None:
    plan = about.memory
    if not about.HasField("memory"):
        return None
    return RunMemory.of(plan, device=dict(plan.device), host=dict(plan.host))
