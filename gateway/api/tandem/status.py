"""What runs, the base models, settings and version, under /api/tandem/v1; and /metrics.

They are for the command line and for scripts. Times are seconds since 1970.
"""

from __future__ import annotations

import os
import time

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, JsonValue

from gateway.api.dependencies import AuditDep, CallerDep, GatewayDep
from gateway.api.fields import Answer, PathText
from gateway.api.routing import Router, file_response
from tandem import __version__
from tandem.errors import UnknownModel

router = Router("/api/tandem/v1", tag="Tandem")
metrics_router = Router(tag="Tandem")


class AddModel(BaseModel):
    name: str
    path: str


class GatewayStatus(Answer):
    version: str
    pid: int
    started_at: float
    data_dir: str


class SessionStatus(Answer):
    id: str
    owner: str
    display_name: str | None
    created_at: float
    idle_seconds: float


class RunStatus(Answer):
    id: str
    session_id: str
    base_model: str
    state: str
    reason: str
    worker: str
    step: int
    parameters: int
    ranks: int
    queued: int
    under_way: int
    weight_version: str


class SamplerStatus(Answer):
    session_id: str
    base_model: str
    state: str
    reason: str
    worker: str
    weight_version: str
    adapters: list[str]
    max_lora_rank: int
    waiting: int


class SamplingSessionStatus(Answer):
    id: str
    kind: str
    base_model: str
    weight_version: str


class WorkerStatus(Answer):
    id: str
    kind: str
    session_id: str
    run_id: str | None
    state: str
    pid: int
    address: str
    metrics_port: int
    log: str
    age_seconds: float


class Status(Answer):
    gateway: GatewayStatus
    sessions: list[SessionStatus]
    runs: list[RunStatus]
    samplers: list[SamplerStatus]
    sampling_sessions: list[SamplingSessionStatus]
    workers: list[WorkerStatus]


class ModelEntry(Answer):
    """`max_length` in tokens, null where the model does not say."""

    name: str
    path: str
    max_length: int | None


class RegisteredModels(Answer):
    models: list[ModelEntry]


class Settings(Answer):
    """The resolved settings, by name; without secrets."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]


class Version(Answer):
    version: str


@router.operation("GET", "/status", role="reader")
async def status(gateway: GatewayDep, caller: CallerDep) -> Status:
    """Return what runs: everything for an admin; for others their own, without how workers are
    reached and where files lie."""
    now = time.time()
    mine = {session.id for session in gateway.sessions.all() if caller.may_see(session.owner)}
    admin = caller.role == "admin"
    return Status(
        gateway=GatewayStatus(
            version=__version__,
            pid=os.getpid() if admin else 0,
            started_at=gateway.started_at,
            data_dir=str(gateway.settings.data_dir) if admin else "",
        ),
        sessions=[
            SessionStatus.of(session, idle_seconds=round(time.monotonic() - session.seen_at, 1))
            for session in gateway.sessions.all()
            if session.id in mine
        ],
        runs=[
            RunStatus.of(
                run,
                base_model=run.model.name,
                reason=run.error.message if run.error is not None else "",
                worker=run.worker.worker_id if run.worker is not None else "",
                queued=run.dispatcher.queued,
                under_way=run.dispatcher.under_way,
                parameters=run.about.parameters,
                ranks=run.about.ranks,
                weight_version=run.parent,
            )
            for run in gateway.runs.all()
            if run.session_id in mine
        ],
        samplers=[
            SamplerStatus.of(
                sampler,
                base_model=sampler.model.name,
                worker=sampler.worker.worker_id if sampler.worker is not None else "",
                weight_version=sampler.weights,
                adapters=sorted(sampler.loaded - {sampler.weights}),
            )
            for sampler in gateway.samplers.all()
            if sampler.session_id in mine
        ],
        sampling_sessions=[
            SamplingSessionStatus.of(session, weight_version=session.version.name)
            for session in gateway.sampling.all()
            if session.session_id in mine
        ],
        workers=[
            WorkerStatus.of(
                worker,
                id=worker.worker_id,
                pid=worker.details.pid if admin else 0,
                address=worker.worker.handle.address if worker.worker and admin else "",
                metrics_port=worker.worker.handle.metrics_port if worker.worker and admin else 0,
                log=str(worker.details.log_path or "") if admin else "",
                age_seconds=round(now - worker.started_at, 1),
            )
            for worker in gateway.fleet.all()
            if worker.session_id in mine
        ],
    )


@router.operation("GET", "/models", role="reader")
async def list_models(gateway: GatewayDep) -> RegisteredModels:
    """List the base models."""
    return RegisteredModels(models=[ModelEntry.of(entry) for entry in gateway.models.all()])


@router.operation(
    "POST",
    "/models",
    role="admin",
    audit="model_add",
    rules=["The path must be the absolute path of a readable model."],
)
async def add_model(body: AddModel, gateway: GatewayDep, audit: AuditDep) -> ModelEntry:
    """Register a base model. A name that is registered already gets the new path."""
    audit.note(body.name)
    return ModelEntry.of(await gateway.models.add(name=body.name, path=body.path))


@router.operation(
    "DELETE", "/models/{name:path}", role="admin", audit="model_remove", errors=[UnknownModel]
)
async def remove_model(name: PathText, gateway: GatewayDep) -> None:
    """Remove a base model's name. What runs with the model continues."""
    await gateway.models.remove(name)


@router.operation("GET", "/config", role="admin")
async def config(gateway: GatewayDep) -> Settings:
    """Return the resolved settings, without the key and without the database's password."""
    settings = gateway.settings.model_dump(mode="json", exclude={"api_key"})
    url = settings["database_url"]
    if "@" in url:
        settings["database_url"] = f"{url.partition('://')[0]}://…@{url.rpartition('@')[2]}"
    return Settings.model_validate(settings)


@router.operation("GET", "/version", role="reader")
async def get_version() -> Version:
    """Return Tandem's version."""
    return Version(version=__version__)


@metrics_router.operation(
    "GET",
    "/metrics",
    role="local",
    responses={200: file_response(CONTENT_TYPE_LATEST, "Prometheus' text format")},
)
async def metrics(gateway: GatewayDep) -> Response:
    """Return the gateway's metrics for Prometheus."""
    return Response(generate_latest(gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)
