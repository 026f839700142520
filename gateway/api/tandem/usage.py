"""The usage of owners and runs, for the command line and scripts."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from gateway.api.dependencies import AccessDep
from gateway.api.fields import PathText
from gateway.api.routing import Router
from gateway.api.tandem.runs import own_run
from gateway.owners.usage.reports import BlueprintReport, UsageSummary
from gateway.owners.usage.run_resources import RunUse, read_run_use
from tandem.errors import UnknownRun

router = Router("/api/tandem/v1", tag="Tandem")


@router.operation("GET", "/runs/{run_id}/usage", role="reader", overseen=True, errors=[UnknownRun])
async def run_usage(run_id: PathText, access: AccessDep) -> RunUse:
    """Return the seconds, processors, devices, memory, tokens and bytes of a run."""
    gateway = access.gateway
    await own_run(run_id, access)
    gateway.write_usage()
    return await read_run_use(gateway.database, run_id)


@router.operation("GET", "/usage", role="reader", overseen=True)
async def usage_summary(
    access: AccessDep,
    since: Annotated[float, Query(ge=0, le=2**53)] = 0.0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 50,
) -> UsageSummary:
    """Sum the usage of owners and runs since a time, to the hour. Admins and maintainers see
    everything, others their own. Return at most `limit` runs, those with the most accelerator
    seconds first. Samples from base models belong to an owner and to no run."""
    return await access.gateway.usage_reports.summary(access.caller, since=since, max_runs=limit)


@router.operation("GET", "/usage/blueprints", role="reader", overseen=True)
async def blueprint_usage(
    access: AccessDep, since: Annotated[float, Query(ge=0, le=2**53)] = 0.0
) -> BlueprintReport:
    """Sum runs, queue seconds and device seconds since a time, by owner and blueprint. Admins and
    maintainers see everything, others their own. Device seconds count from the hour on, and queue
    seconds of the last seven days."""
    return await access.gateway.usage_reports.by_blueprint(access.caller, since=since)
