"""Training runs as they are listed and described, also long after they have ended."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from gateway.api.dependencies import CallerDep, GatewayDep
from gateway.api.fields import Answer, Limit, Offset, PathText, ProjectFilter, Time, UserMetadata
from gateway.api.routing import Router
from gateway.api.tinker.checkpoints import CheckpointInfo, PageCursor, described
from gateway.auth.identity import Caller, Scope
from gateway.runs.queries import RunRecord
from tandem.errors import UnknownRun

router = Router("/api/v1", tag="SDK")


class RunInfo(Answer):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    lora_rank: int | None
    corrupted: bool
    last_request_time: Time
    last_checkpoint: CheckpointInfo | None
    last_sampler_checkpoint: CheckpointInfo | None
    user_metadata: UserMetadata


class RunPage(Answer):
    training_runs: list[RunInfo]
    cursor: PageCursor


@router.operation("GET", "/training_runs", role="reader")
async def training_runs(
    gateway: GatewayDep,
    caller: CallerDep,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Annotated[Scope, Query()] = "owned",
    project_id: Annotated[ProjectFilter, Query()] = None,
) -> RunPage:
    """Return a page of runs, newest first."""
    runs, total = await gateway.run_queries.runs(
        caller, scope=access_scope, project_id=project_id, limit=limit, offset=offset
    )
    return RunPage(
        training_runs=[_run(run, caller) for run in runs],
        cursor=PageCursor(offset=offset, limit=limit, total_count=total),
    )


@router.operation("GET", "/training_runs/{run_id}", role="reader", errors=[UnknownRun])
async def training_run(
    run_id: PathText,
    gateway: GatewayDep,
    caller: CallerDep,
    access_scope: Annotated[Scope, Query()] = "owned",
) -> RunInfo:
    """Describe a run, also long after it has ended."""
    return _run(await gateway.run_queries.run(run_id, caller, scope=access_scope), caller)


def _run(run: RunRecord, caller: Caller) -> RunInfo:
    """Of another owner's run, which has a published checkpoint, only what goes with that."""
    lora = run.training.lora
    own = caller.may_see(run.owner)
    training, sampler = (
        described(last) if last is not None and (own or last.public) else None
        for last in (run.last_training, run.last_sampler)
    )
    return RunInfo(
        training_run_id=run.id,
        base_model=run.base_model,
        model_owner=run.owner,
        is_lora=lora is not None,
        lora_rank=lora.rank if lora is not None else None,
        corrupted=run.failed,
        last_request_time=run.last_request_at,
        last_checkpoint=training,
        last_sampler_checkpoint=sampler,
        user_metadata=run.user_metadata if own else None,
    )
