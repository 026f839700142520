"""Tandem's own routes, under /api/tandem/v1, for the command line and for scripts.

The key is the same as the SDK's, in X-API-Key. Errors look as they do under /api/v1.
"""

from __future__ import annotations

import os
import time

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.wire import (
    caller_of,
    gateway_of,
    json_response,
    note_for_audit,
    parse,
    read_body,
)
from gateway.checkpoints.base_models import BaseModelEntry
from tandem import __version__


class AddModel(BaseModel):
    name: str
    path: str


async def status(request: Request) -> Response:
    """What runs: `{"gateway": {"version", "pid", "started_at", "data_dir"}, "sessions": [{"id",
    "owner", "display_name", "created_at", "idle_seconds"}], "runs": [{"id", "session_id",
    "base_model", "state", "reason", "worker", "step", "parameters", "ranks", "queued",
    "under_way", "weight_version"}], "samplers": [{"session_id", "base_model", "state", "reason",
    "worker", "weight_version", "waiting"}], "sampling_sessions": [{"id", "kind", "base_model",
    "weight_version"}], "workers": [{"id", "kind", "session_id", "run_id", "state", "pid",
    "address", "metrics_port", "log", "age_seconds"}]}`. Times are seconds since 1970.

    All owners' for an admin, else the caller's own, without how workers are reached."""
    gateway, caller = gateway_of(request), caller_of(request)
    now = time.time()
    mine = {session.id for session in gateway.sessions.all() if caller.may_see(session.owner)}
    admin = caller.role == "admin"  # how workers are reached, and where files lie, is for admins
    return json_response(
        {
            "gateway": {
                "version": __version__,
                "pid": os.getpid() if admin else 0,
                "started_at": gateway.started_at,
                "data_dir": str(gateway.settings.data_dir) if admin else "",
            },
            "sessions": [
                {
                    "id": session.id,
                    "owner": session.owner,
                    "display_name": session.display_name,
                    "created_at": session.created_at,
                    "idle_seconds": round(time.monotonic() - session.seen_at, 1),
                }
                for session in gateway.sessions.all()
                if session.id in mine
            ],
            "runs": [
                {
                    "id": run.id,
                    "session_id": run.session_id,
                    "base_model": run.model.name,
                    "state": run.state,
                    "reason": run.error.message if run.error is not None else "",
                    "worker": run.worker.worker_id if run.worker is not None else "",
                    "step": run.step,
                    "parameters": run.parameters,
                    "ranks": run.ranks,
                    "queued": run.dispatcher.queued,
                    "under_way": run.dispatcher.under_way,
                    "weight_version": run.parent,
                }
                for run in gateway.runs.all()
                if run.session_id in mine
            ],
            "samplers": [
                {
                    "session_id": sampler.session_id,
                    "base_model": sampler.model.name,
                    "state": sampler.state,
                    "reason": sampler.reason,
                    "worker": sampler.worker.worker_id if sampler.worker is not None else "",
                    "weight_version": sampler.weights,
                    "adapters": sorted(sampler.loaded - {sampler.weights}),
                    "max_lora_rank": sampler.max_lora_rank,
                    "waiting": sampler.waiting,
                }
                for sampler in gateway.samplers.all()
                if sampler.session_id in mine
            ],
            "sampling_sessions": [
                {
                    "id": session.id,
                    "kind": session.kind,
                    "base_model": session.base_model,
                    "weight_version": session.version.name,
                }
                for session in gateway.sampling.all()
                if session.session_id in mine
            ],
            "workers": [
                {
                    "id": worker.worker_id,
                    "kind": worker.kind,
                    "session_id": worker.session_id,
                    "run_id": worker.run_id,
                    "state": worker.state,
                    "pid": worker.details.pid if admin else 0,
                    "address": worker.worker.handle.address if worker.worker and admin else "",
                    "metrics_port": worker.worker.handle.metrics_port
                    if worker.worker and admin
                    else 0,
                    "log": str(worker.details.log_path or "") if admin else "",
                    "age_seconds": round(now - worker.started_at, 1),
                }
                for worker in gateway.fleet.all()
                if worker.session_id in mine
            ],
        }
    )


async def list_models(request: Request) -> Response:
    """The base models: `{"models": [{"name", "path", "max_length"}]}`; `max_length` in tokens,
    or null."""
    return json_response({"models": [_model(m) for m in gateway_of(request).models.all()]})


async def add_model(request: Request) -> Response:
    """Registers a base model. Takes `{"name", "path"}`, the path absolute; answers with the
    model. A name that is there already gets the new path."""
    body = parse(AddModel, await read_body(request))
    note_for_audit(request, target=body.name)
    entry = await gateway_of(request).models.add(name=body.name, path=body.path)
    return json_response(_model(entry))


async def remove_model(request: Request) -> Response:
    """Removes a base model's name. What runs with the model goes on."""
    await gateway_of(request).models.remove(request.path_params["name"])
    return Response(status_code=204)


async def config(request: Request) -> Response:
    """The resolved settings, without the key and without a password in the database's URL."""
    settings = gateway_of(request).settings.model_dump(mode="json", exclude={"api_key"})
    url = settings["database_url"]
    if "@" in url:
        settings["database_url"] = f"{url.partition('://')[0]}://…@{url.rpartition('@')[2]}"
    return json_response(settings)


async def get_version(_request: Request) -> Response:
    """Tandem's version: `{"version": "0.1.0"}`"""
    return json_response({"version": __version__})


def _model(entry: BaseModelEntry) -> dict[str, object]:
    return {"name": entry.name, "path": entry.path, "max_length": entry.max_length}
