"""Status, base models, settings and version, under /api/tandem/v1. Also /metrics.

For the command line and scripts. Times are in seconds since 1970."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, JsonValue

from gateway.api.dependencies import AccessDep
from gateway.api.fields import Answer, PathText
from gateway.api.routing import Router, file_response
from gateway.runs.operations import Call, Progress
from gateway.workers.worker import Worker
from tandem import __version__
from tandem.errors import UnknownModel
from tandem.settings.gateway import without_password

router = Router("/api/tandem/v1", tag="Tandem")
root_router = Router(tag="Tandem")


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


class OperationUnderWay(Answer):
    """The operation that a run's trainer works on. `says` describes it in words. `seconds` counts
    from its turn, or from its acceptance before the trainer was asked. Tokens are its batch's, 0
    without a batch."""

    seq_id: int
    kind: str
    says: str
    seconds: float
    tokens_done: int
    tokens: int
    tokens_per_second: float


class RunStatus(Answer):
    """`queued` counts operations that have not ended, `under_way` the begun ones of them. A publish
    may end after its client has the result. `restored` counts restorations of its trainer.
    `snapshot_step` is the newest snapshot's step, or 0. `snapshot_problem` explains a missing or
    useless newer snapshot. `micro_batch_tokens` is the largest micro-batch, which shrinks after
    running out of memory."""

    id: str
    name: str
    session_id: str
    base_model: str
    state: str
    reason: str
    worker: str
    step: int
    parameters: int
    ranks: int
    micro_batch_tokens: int
    queued: int
    under_way: int
    operation: OperationUnderWay | None
    weight_version: str
    restored: int
    snapshot_step: int
    snapshot_problem: str


class SamplerStatus(Answer):
    """One engine of a sampler, with the number `replica`. `leaving`: the sampler was scaled down,
    and the engine finishes its requests. `session_id` is the sampler's original session, "" if
    hidden from the caller. `waiting` counts the sampler's unfinished samples, `under_way` this
    engine's requests."""

    session_id: str
    base_model: str
    replica: int
    state: str
    reason: str
    worker: str
    weight_version: str
    adapters: list[str]
    max_lora_rank: int
    waiting: int
    under_way: int


class SamplingSessionStatus(Answer):
    id: str
    kind: str
    base_model: str
    weight_version: str


class WorkerStatus(Answer):
    """A shared worker of a hidden session is called by its kind. `version` is its Tandem version,
    with the image's tag if that differs, "" before its first heartbeat."""

    id: str
    kind: str
    session_id: str
    run_id: str | None
    state: str
    version: str
    pid: int
    address: str
    metrics_port: int
    log: str
    age_seconds: float


class Status(Answer):
    """`warnings` are sentences for an admin."""

    gateway: GatewayStatus
    warnings: list[str]
    sessions: list[SessionStatus]
    runs: list[RunStatus]
    samplers: list[SamplerStatus]
    sampling_sessions: list[SamplingSessionStatus]
    workers: list[WorkerStatus]


class ModelEntry(Answer):
    """`path` is for admins, empty for others. `max_length` is in tokens, null if unknown. `note`
    names a limitation of the model's name, if any."""

    name: str
    path: str
    max_length: int | None
    note: str


class RegisteredModels(Answer):
    models: list[ModelEntry]


class Settings(Answer):
    """The resolved settings by name, without secrets."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]


class Version(Answer):
    """`owner` and `role` are those of the key."""

    version: str
    owner: str
    role: str


@router.operation("GET", "/status", role="reader", overseen=True)
async def status(access: AccessDep) -> Status:
    """Return the status of everything for an admin. Others do not see the addresses of workers and
    the paths of files, and only maintainers see other owners' things."""
    gateway, caller, now = access.gateway, access.caller, time.time()
    mine = {session.id for session in gateway.sessions.all() if caller.may_see(session.owner)}
    admin = caller.role == "admin"

    def seen(session_id: str) -> bool:
        return caller.sees_all or session_id in mine

    def name_of(worker: Worker | None) -> str:
        if worker is None:
            return ""
        return worker.worker_id if seen(worker.handle.session_id) else worker.handle.kind

    def seen_version(name: str) -> bool:
        return name.startswith("base/") or seen(name.partition(":")[0])

    seen_runs = [run for run in gateway.runs.all() if run.session_id in mine]
    of_mine = [run.host.worker for run in seen_runs]
    engines = [
        (sampler, engine)
        for sampler in gateway.samplers.all()
        if sampler.users & mine
        for engine in (*sampler.engines, *sampler.replicas.leaving)
    ]
    of_mine += [engine.worker for _, engine in engines]
    shared = {worker.worker_id for worker in of_mine if worker is not None}
    names = await gateway.run_records.names([run.id for run in seen_runs], caller)
    return Status(
        gateway=GatewayStatus(
            version=__version__,
            pid=os.getpid() if admin else 0,
            started_at=gateway.started_at,
            data_dir=str(gateway.settings.data_dir) if admin else "",
        ),
        warnings=[*await gateway.collector.warnings(), *gateway.processes.warnings()]
        if admin
        else [],
        sessions=[
            SessionStatus.of(session, idle_seconds=round(time.monotonic() - session.seen_at, 1))
            for session in gateway.sessions.all()
            if session.id in mine
        ],
        runs=[
            RunStatus.of(
                run,
                name=names.get(run.id, ""),
                base_model=run.model.name,
                reason=run.error.message if run.error is not None else run.trouble,
                worker=name_of(run.host.worker),
                queued=run.dispatcher.queued,
                under_way=run.dispatcher.under_way,
                operation=_under_way(run.dispatcher.first),
                parameters=run.about.parameters,
                ranks=run.about.ranks,
                micro_batch_tokens=run.about.micro_batch_tokens,
                weight_version=run.parent,
            )
            for run in seen_runs
        ],
        samplers=[
            SamplerStatus.of(
                engine,
                base_model=engine.model.name,
                state=engine.state if engine in sampler.engines else "leaving",
                reason=engine.explain()
                if engine.state == "queued"
                else engine.silence
                or engine.reason
                or "; ".join(
                    f"it refused {name}: {reason}"
                    for name, reason in engine.refused.items()
                    if seen_version(name)
                ),
                session_id=engine.session_id if seen(engine.session_id) else "",
                worker=name_of(engine.worker),
                weight_version=engine.weights
                if sampler.users <= mine or seen_version(engine.weights)
                else "",
                adapters=sorted(
                    name
                    for name in engine.loaded - {engine.weights}
                    if sampler.users <= mine or seen_version(name)
                ),
                waiting=sampler.waiting,
                under_way=sampler.balancer.load_of(engine).requests,
            )
            for sampler, engine in engines
        ],
        sampling_sessions=[
            SamplingSessionStatus.of(session, weight_version=session.version.name)
            for session in gateway.sampling.all()
            if session.session_id in mine
        ],
        workers=[
            WorkerStatus.of(
                worker,
                id=worker.worker_id if seen(worker.session_id) else worker.kind,
                session_id=worker.session_id if seen(worker.session_id) else "",
                run_id=worker.run_id if seen(worker.session_id) else None,
                pid=worker.worker.handle.pid if worker.worker and admin else 0,
                address=worker.worker.handle.address if worker.worker and admin else "",
                metrics_port=worker.worker.handle.metrics_port if worker.worker and admin else 0,
                log=worker.worker.handle.log_path if worker.worker and admin else "",
                age_seconds=round(now - worker.started_at, 1),
            )
            for worker in gateway.processes.list_records()
            if worker.session_id in mine or worker.worker_id in shared
        ],
    )


def _under_way(call: Call | None) -> OperationUnderWay | None:
    if call is None:
        return None
    age = time.monotonic() - call.operation.future.accepted_at
    progress = call.progress or Progress(seconds=age)
    return OperationUnderWay(
        seq_id=call.operation.seq_id,
        kind=call.operation.kind,
        says=call.describe(),
        seconds=round(progress.seconds, 1),
        tokens_done=progress.tokens_done,
        tokens=progress.tokens,
        tokens_per_second=round(progress.tokens_per_second, 1),
    )


@router.operation("GET", "/models", role="reader")
async def list_models(access: AccessDep) -> RegisteredModels:
    """List the base models. Only an admin sees their paths."""
    found = access.gateway.models.all()
    if access.caller.role != "admin":
        found = [replace(entry, path="") for entry in found]
    return RegisteredModels(models=[ModelEntry.of(entry) for entry in found])


@router.operation(
    "POST",
    "/models",
    role="admin",
    audit="model_add",
    rules=["The path must be the absolute path of a readable model."],
)
async def add_model(body: AddModel, access: AccessDep) -> ModelEntry:
    """Register a base model. A registered name gets the new path."""
    access.audit.note(body.name)
    return ModelEntry.of(await access.gateway.models.add(name=body.name, path=body.path))


@router.operation(
    "DELETE",
    "/models/{name:path}",
    role="admin",
    audit="model_remove",
    errors=[UnknownModel],
    rules=["The record of a model of the models directory must be removable."],
)
async def remove_model(name: PathText, access: AccessDep) -> None:
    """Remove a base model's name, and its record in the models directory. Its files stay, and its
    runs continue."""
    await access.gateway.models.remove(name)


@router.operation("GET", "/config", role="admin")
async def config(access: AccessDep) -> Settings:
    """Return the resolved settings, without keys and the database's password."""
    settings = access.gateway.settings.model_dump(mode="json")
    settings["database_url"] = without_password(settings["database_url"])
    return Settings.model_validate(settings)


@router.operation("GET", "/version", role="reader")
async def get_version(access: AccessDep) -> Version:
    """Return Tandem's version, and the owner and role of the caller's key."""
    return Version.of(access.caller, version=__version__)


@root_router.operation(
    "GET",
    "/metrics",
    role="local",
    responses={200: file_response(CONTENT_TYPE_LATEST, "Prometheus' text format")},
)
async def metrics(access: AccessDep) -> Response:
    """Return the gateway's metrics for Prometheus."""
    return Response(
        generate_latest(access.gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST
    )
