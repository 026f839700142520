"""The usage of owners and runs, for the command line and scripts."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from gateway.api.dependencies import AccessDep
from gateway.api.fields import Answer, PathText
from gateway.api.routing import Router
from gateway.api.tandem.runs import own_run
from gateway.owners.usage.run_resources import RunUse, read_run_use
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


@router.operation("GET", "/runs/{run_id}/usage", role="reader", errors=[UnknownRun])
async def run_usage(run_id: PathText, access: AccessDep) -> RunUse:
    """Return the seconds, processors, devices, memory, tokens and bytes of a run."""
    gateway = access.gateway
    await own_run(run_id, access)
    gateway.write_usage()
    return await read_run_use(gateway.database, run_id)


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
