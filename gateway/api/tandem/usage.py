"""The usage of owners and runs, for the command line and scripts."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from gateway.api.dependencies import AccessDep
from gateway.api.fields import Answer, PathText
from gateway.api.routing import Router
from gateway.identifiers import unknown_run
from tandem.errors import UnknownRun

router = Router("/api/tandem/v1", tag="Tandem")


class OwnerUsage(Answer):
    """`training_tokens` were trained. Samples used `prompt_tokens`, `cached_tokens` of them from
    the prefix cache, and returned `sampled_tokens`. `checkpoints` exist now."""

    owner: str
    training_tokens: int
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    accelerator_seconds: float
    checkpoints: int
    checkpoint_bytes: int


class RunUsage(OwnerUsage):
    """`owner` trained the run or sampled from its weights."""

    run_id: str
    name: str
    base_model: str


class UsageSummary(Answer):
    owners: list[OwnerUsage]
    runs: list[RunUsage]


class WorkerUse(Answer):
    """A run's part of its trainer, or of its engines together.

    The workers waited for `queue_seconds`, started for `start_seconds` and were awake for
    `run_seconds`. Runs may share workers. `share` is this run's part of their computing, and
    `compute_seconds` its own computing. `duty` is `compute_seconds` by `run_seconds`.
    `cpu_seconds`, `cpu_average` (in cores) and `gpu_average` are the run's part. Peaks are those
    of the workers. Utilisation is from 0 to 1. It is `measured` of the workers' processes
    (`process`), or of their devices while awake, with other processes on them (`shared`). Unknown
    values are null."""

    queue_seconds: float
    start_seconds: float
    run_seconds: float
    compute_seconds: float
    duty: float | None
    share: float
    cpu_seconds: float | None
    cpu_average: float | None
    memory_peak_bytes: int | None
    gpu_average: float | None
    gpu_peak: float | None
    gpu_memory_peak_bytes: int | None
    measured: str | None


class RunUse(Answer):
    """`trainer` and `sampler` are null without such workers. The run trained `training_tokens`.
    Samples from its weights read `prompt_tokens`, `cached_tokens` of them from the prefix cache,
    and returned `sampled_tokens`."""

    run_id: str
    trainer: WorkerUse | None
    sampler: WorkerUse | None
    training_tokens: int
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    checkpoint_bytes: int
    record_bytes: int


@router.operation("GET", "/runs/{run_id}/usage", role="reader", errors=[UnknownRun])
async def run_usage(run_id: PathText, access: AccessDep) -> RunUse:
    """Return the seconds, processors, devices, memory, tokens and bytes of a run."""
    gateway = access.gateway
    run = await gateway.run_records.run(run_id, access.caller, scope="accessible")
    if not access.caller.may_see(run.owner):  # a published checkpoint does not show this
        raise unknown_run(run_id)
    gateway.write_usage()
    found = await gateway.run_resources.read_resources(run_id)
    workers = {
        name: WorkerUse.of(part) if (part := getattr(found, name)) is not None else None
        for name in ("trainer", "sampler")
    }
    return RunUse.of(found, **workers)


@router.operation("GET", "/usage", role="reader")
async def usage_summary(
    access: AccessDep,
    since: Annotated[float, Query(ge=0, le=2**53)] = 0.0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 50,
) -> UsageSummary:
    """Sum the usage of owners and runs since a time, to the hour. An admin sees everything, others
    their own. Return at most `limit` runs, those with the most accelerator seconds first. Samples
    from base models belong to an owner and to no run."""
    owners, runs = await access.gateway.usage_reports.summary(
        access.caller, since=since, max_runs=limit
    )
    names = await access.gateway.run_records.names([used.run_id for used in runs], access.caller)
    return UsageSummary(
        owners=[OwnerUsage.of(used) for used in owners],
        runs=[RunUsage.of(used, name=names.get(used.run_id, "")) for used in runs],
    )
