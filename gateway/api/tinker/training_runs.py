"""Training runs as they are listed and described, also long after they have ended."""

from __future__ import annotations

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.tinker.checkpoints import described
from gateway.api.tinker.sessions import PageQuery, ScopeQuery
from gateway.api.wire import caller_of, gateway_of, iso, json_response, parse_query
from gateway.auth.identity import Caller
from gateway.runs.queries import RunRecord


class RunsQuery(PageQuery):
    project_id: str | None = Field(None, max_length=200)


async def training_runs(request: Request) -> Response:
    """A page of runs, newest first."""
    query = parse_query(RunsQuery, request)
    caller = caller_of(request)
    page = await gateway_of(request).directory.runs(
        caller,
        scope=query.access_scope,
        project_id=query.project_id,
        limit=query.limit,
        offset=query.offset,
    )
    return json_response(
        {
            "training_runs": [_run(run, caller) for run in page.runs],
            "cursor": {"offset": query.offset, "limit": query.limit, "total_count": page.total},
        }
    )


async def training_run(request: Request) -> Response:
    """A run, also long after it has ended."""
    query = parse_query(ScopeQuery, request)
    caller = caller_of(request)
    run = await gateway_of(request).directory.run(
        request.path_params["run_id"], caller, scope=query.access_scope
    )
    return json_response(_run(run, caller))


def _run(run: RunRecord, caller: Caller) -> dict[str, object]:
    """Of another owner's run, which has a published checkpoint, only what goes with that."""
    lora = run.training.lora
    own = caller.may_see(run.owner)
    training, sampler = (
        described(last) if last is not None and (own or last.public) else None
        for last in (run.last_training, run.last_sampler)
    )
    return {
        "training_run_id": run.id,
        "base_model": run.base_model,
        "model_owner": run.owner,
        "is_lora": lora is not None,
        "lora_rank": lora.rank if lora is not None else None,
        "corrupted": run.failed,
        "last_request_time": iso(run.last_request_at),
        "last_checkpoint": training,
        "last_sampler_checkpoint": sampler,
        "user_metadata": run.user_metadata if own else None,
    }
