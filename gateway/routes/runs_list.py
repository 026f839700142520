"""Training runs as they are listed and described, also long after they have ended."""

from __future__ import annotations

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.directory import RunRecord
from gateway.routes.checkpoints import described
from gateway.routes.sessions import PageQuery, ScopeQuery
from gateway.routes.wire import caller_of, gateway_of, iso, json_response, parse_query


class RunsQuery(PageQuery):
    project_id: str | None = Field(None, max_length=200)


async def training_runs(request: Request) -> Response:
    """A page of runs, newest first."""
    query = parse_query(RunsQuery, request)
    page = await gateway_of(request).directory.runs(
        caller_of(request),
        scope=query.access_scope,
        project_id=query.project_id,
        limit=query.limit,
        offset=query.offset,
    )
    return json_response(
        {
            "training_runs": [_run(run) for run in page.runs],
            "cursor": {"offset": query.offset, "limit": query.limit, "total_count": page.total},
        }
    )


async def training_run(request: Request) -> Response:
    query = parse_query(ScopeQuery, request)
    run = await gateway_of(request).directory.run(
        request.path_params["run_id"], caller_of(request), scope=query.access_scope
    )
    return json_response(_run(run))


def _run(run: RunRecord) -> dict[str, object]:
    lora = run.training.lora
    return {
        "training_run_id": run.id,
        "base_model": run.base_model,
        "model_owner": run.owner,
        "is_lora": lora is not None,
        "lora_rank": lora.rank if lora is not None else None,
        "corrupted": run.failed,
        "last_request_time": iso(run.last_request_at),
        "last_checkpoint": described(run.last_training) if run.last_training else None,
        "last_sampler_checkpoint": described(run.last_sampler) if run.last_sampler else None,
        "user_metadata": run.user_metadata,
    }
