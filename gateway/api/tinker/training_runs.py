"""Training runs: their creation, their training and their lists, even after their end."""

from __future__ import annotations

import secrets
from typing import Annotated, Literal

from fastapi import Query
from pydantic import BaseModel, Field

from gateway.api.dependencies import AccessDep
from gateway.api.fields import Answer, Limit, Offset, PathText, ProjectFilter, Time, UserMetadata
from gateway.api.request_body import STORED_BODY
from gateway.api.routing import Router
from gateway.api.tinker.checkpoints import (
    CheckpointInfo,
    OptimizerName,
    PageCursor,
    described,
    optimizer_name,
)
from gateway.api.tinker.service import ASKS
from gateway.checkpoints.base_models import BaseModelEntry
from gateway.core import Gateway
from gateway.identifiers import request_id_of, run_id_of, split_model_name
from gateway.owners.auth.identity import Caller, Scope
from gateway.owners.sessions.registry import RunMetadata
from gateway.runs.record.identity import metadata_of
from gateway.runs.record.rows import RunFilters, RunRecord
from tandem.errors import (
    InvalidRequest,
    OptimizerSetting,
    SequenceTaken,
    SessionFinished,
    UnknownModel,
    UnknownRun,
    UnknownSession,
    UnsuitableLora,
)
from tandem.protocol.worker import LoraSpec, TrainingSpec

TRAINING_KEY = "tandem_training"
"""The key of `user_metadata` that requests full training with the value `full`, for unmodified
clients."""

router = Router("/api/v1", tag="SDK")


class OptimizerConfig(BaseModel):
    type: str = "adamw"
    version: int | None = None


class LoraConfig(BaseModel):
    """The SDK's form. Without a seed, one is drawn."""

    rank: int = Field(ge=1, le=512)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(BaseModel):
    session_id: str
    model_seq_id: int = Field(ge=0, lt=10**18)
    base_model: str
    user_metadata: RunMetadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class OperationAccepted(Answer):
    """An operation in a run's journal. `retrieve_future` returns its result."""

    request_id: str
    model_id: str


class ModelId(BaseModel):
    model_id: str


class ModelData(Answer):
    arch: str | None
    model_name: str
    tokenizer_id: str


class TrainingInfo(Answer):
    type: Literal["get_info"]
    model_id: str
    model_name: str
    is_lora: bool
    lora_rank: int | None
    model_data: ModelData
    optimizer_config: OptimizerName


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


@router.operation(
    "POST",
    "/create_model",
    role="ci",
    audit="run_create",
    errors=[UnknownSession, UnknownModel, SessionFinished, SequenceTaken],
    rules=[
        ASKS,
        "The optimizer must be a known one, and a LoRA configuration must train something.",
        "A repeated `model_seq_id` must come with the same body.",
    ],
    bounds=STORED_BODY,
)
async def create_model(body: CreateModel, access: AccessDep) -> OperationAccepted:
    """Begin a training run. A user's mistake is answered at once, so that the SDK raises its typed
    error."""
    await access.session_for_run(body.session_id, body.user_metadata)
    optimizer = known_optimizer(body.optimizer_config)
    model, full = model_of(access.gateway, body.base_model, body.user_metadata)
    lora = None if full or body.lora_config is None else _lora_spec(body.lora_config)
    await access.gateway.runs.create(
        session_id=body.session_id,
        model_seq_id=body.model_seq_id,
        model=model,
        training=TrainingSpec(lora=lora, optimizer=optimizer),
        load=None,
        user_metadata=body.user_metadata,
        request=await access.raw_body(),
        admin=access.caller.role == "admin",
    )
    run_id = run_id_of(session_id=body.session_id, model_seq_id=body.model_seq_id)
    access.audit.note(run_id, base_model=body.base_model)
    return accepted(run_id, 0)


@router.operation(
    "POST", "/get_info", role="reader", audit=None, errors=[UnknownRun, SessionFinished]
)
async def get_info(body: ModelId, access: AccessDep) -> TrainingInfo:
    """Describe a run's training, even after its end while its session is active."""
    await access.run(body.model_id)
    run = access.gateway.runs.get(body.model_id)
    if run is None:
        raise UnknownRun(f"training run {body.model_id!r} does not run on this server")
    lora = run.training.lora
    return TrainingInfo(
        type="get_info",
        model_id=run.id,
        model_name=run.model.name,
        is_lora=lora is not None,
        lora_rank=lora.rank if lora is not None else None,
        model_data=ModelData(
            arch=run.about.architecture or None,
            model_name=run.model.name,
            # The SDK takes a path unchanged, but would split a name.
            tokenizer_id=run.model.path,
        ),
        optimizer_config=optimizer_name(run.training.optimizer),
    )


@router.operation("GET", "/training_runs", role="reader", overseen=True)
async def training_runs(
    access: AccessDep,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Annotated[Scope, Query()] = "owned",
    project_id: Annotated[ProjectFilter, Query()] = None,
) -> RunPage:
    """Return a page of runs, newest first."""
    runs, total = await access.gateway.run_records.runs(
        access.caller,
        scope=access_scope,
        filters=RunFilters(project_id=project_id),
        limit=limit,
        offset=offset,
    )
    return RunPage(
        training_runs=[_run(run, access.caller) for run in runs],
        cursor=PageCursor(offset=offset, limit=limit, total_count=total),
    )


@router.operation(
    "GET", "/training_runs/{run_id}", role="reader", overseen=True, errors=[UnknownRun]
)
async def training_run(
    run_id: PathText,
    access: AccessDep,
    access_scope: Annotated[Scope, Query()] = "owned",
) -> RunInfo:
    """Describe a run, even long after its end."""
    run = await access.gateway.run_records.run(run_id, access.caller, scope=access_scope)
    return _run(run, access.caller)


def accepted(run_id: str, seq_id: int) -> OperationAccepted:
    return OperationAccepted(request_id=request_id_of(owner=run_id, seq_id=seq_id), model_id=run_id)


def known_optimizer(config: OptimizerConfig) -> Literal["adamw", "dimuon"]:
    """Return the requested optimizer. Raises `OptimizerSetting`."""
    if config.type == "dimuon" and config.version in (None, 1):
        return "dimuon"
    if config.type == "adamw":
        return "adamw"
    version = f" version {config.version}" if config.version is not None else ""
    raise OptimizerSetting(
        f"the optimizer {config.type!r}{version} is unknown; known: adamw, dimuon version 1"
    )


def model_of(
    gateway: Gateway, base_model: str, user_metadata: RunMetadata | None
) -> tuple[BaseModelEntry, bool]:
    """Return the model, and whether its suffix or the metadata request full training. Raises
    `UnknownModel` or `InvalidRequest`."""
    name, full = split_model_name(base_model)
    model = gateway.models.get(name)
    choice = (user_metadata or {}).get(TRAINING_KEY)
    if not full and choice not in (None, "full"):
        raise InvalidRequest(f"user_metadata: {TRAINING_KEY} is {choice!r}; known: 'full'")
    return model, full or choice == "full"


def _lora_spec(config: LoraConfig) -> LoraSpec:
    """Raises `UnsuitableLora` if nothing would be trained."""
    if not (config.train_attn or config.train_mlp or config.train_unembed):
        raise UnsuitableLora(
            "lora_config trains nothing; set one of train_attn, train_mlp and train_unembed"
        )
    return LoraSpec(
        rank=config.rank,
        alpha=32.0,  # for every rank, so that one learning rate suits all ranks
        seed=secrets.randbits(31) if config.seed is None else config.seed,
        attention=config.train_attn,
        mlp=config.train_mlp,
        unembedding=config.train_unembed,
    )


def _run(run: RunRecord, caller: Caller) -> RunInfo:
    lora = run.training.lora
    own = caller.may_see(run.owner)
    training, sampler = (
        described(last) if last is not None and (own or last.public) else None
        for last in (run.last_training, run.last_sampler)
    )
    return RunInfo.of(
        run,
        training_run_id=run.id,
        model_owner=run.owner,
        is_lora=lora is not None,
        lora_rank=lora.rank if lora is not None else None,
        corrupted=run.failed,
        last_request_time=run.last_request_at,
        last_checkpoint=training,
        last_sampler_checkpoint=sampler,
        user_metadata=metadata_of(run.identity, run.user_metadata) if own else None,
    )
