"""Training runs begin: anew, or from a saved state."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, Field

from gateway.api.dependencies import AccessDep, AuditDep, AuditNote, GatewayDep, RawBody
from gateway.api.fields import Answer
from gateway.api.request_body import SMALL_BODY
from gateway.api.routing import Router
from gateway.auth.identity import Readers
from gateway.checkpoints.compatibility import training_from
from gateway.core import Gateway
from gateway.identifiers import request_id_of, run_id_of, split_model_name
from gateway.runs.operations import LoadWeights
from gateway.sessions.metadata import Metadata
from tandem.errors import (
    InvalidRequest,
    OptimizerSetting,
    SessionFinished,
    UnknownModel,
    UnknownSession,
    UnsuitableLora,
)
from tandem.worker import LoraSpec, TrainingSpec

TRAINING_KEY = "tandem_training"
"""The key of `user_metadata` that chooses the kind of training; its only value is `full`."""

LORA_ALPHA = 32.0
"""For every rank: a learning rate then suits adapters of every rank about as well."""

router = Router("/api/v1", tag="SDK")


class OptimizerConfig(BaseModel):
    type: str = "adamw"
    version: int | None = None


class LoraConfig(BaseModel):
    """As the SDK has it. No seed: one is drawn."""

    rank: int = Field(ge=1, le=512)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(BaseModel):
    session_id: str
    model_seq_id: int = Field(ge=0, lt=10**18)
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class CreateViaLoad(BaseModel):
    session_id: str
    model_seq_id: int = Field(ge=0, lt=10**18)
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig | None = None


class OperationAccepted(Answer):
    """An operation in a run's journal; `retrieve_future` returns its result."""

    request_id: str
    model_id: str


@router.operation(
    "POST",
    "/create_model",
    role="member",
    audit="run_create",
    errors=[UnknownSession, UnknownModel, SessionFinished],
    rules=[
        "The optimizer must be a known one, and a LoRA configuration must train something.",
    ],
    body_limit=SMALL_BODY,
)
async def create_model(
    body: CreateModel, raw: RawBody, gateway: GatewayDep, access: AccessDep, audit: AuditDep
) -> OperationAccepted:
    """Begin a training run. A user's mistake is answered at once, so that the SDK raises its
    typed error at once."""
    await access.session(body.session_id)
    optimizer = known_optimizer(body.optimizer_config)
    name, full = split_model_name(body.base_model)
    model = gateway.models.get(name)
    full = full or wants_full_training(body.user_metadata)
    lora = None if full or body.lora_config is None else lora_spec(body.lora_config)
    await gateway.runs.create(
        session_id=body.session_id,
        model_seq_id=body.model_seq_id,
        model=model,
        training=TrainingSpec(lora=lora, optimizer=optimizer),
        load=None,
        user_metadata=body.user_metadata,
        request=raw,
    )
    run_id = run_id_of(session_id=body.session_id, model_seq_id=body.model_seq_id)
    audit.note(run_id, base_model=body.base_model)
    return accepted(run_id, 0)


async def create_via_load(
    gateway: Gateway,
    raw: bytes,
    *,
    body: CreateViaLoad,
    load: LoadWeights,
    readers: Readers,
    audit: AuditNote,
) -> OperationAccepted:
    """Begin a run, in a session of the caller, with a saved state that one of `readers` may
    read. `raw` is the body as it is kept in the journal."""
    asked = known_optimizer(body.optimizer_config) if body.optimizer_config else None
    checkpoint = await gateway.checkpoints.get_trainable(load.path, readers=readers)
    name, full = split_model_name(body.base_model or checkpoint.base_model)
    origin = await gateway.checkpoints.origin(checkpoint.path.run_id)
    await gateway.runs.create(
        session_id=body.session_id,
        model_seq_id=body.model_seq_id,
        model=gateway.models.get(name),
        training=training_from(
            path=load.path,
            saved=origin.training,
            full=full or wants_full_training(body.user_metadata),
            optimizer=load.optimizer,
            asked=asked,
        ),
        load=load,
        user_metadata=body.user_metadata,
        request=raw,
    )
    run_id = run_id_of(session_id=body.session_id, model_seq_id=body.model_seq_id)
    audit.note(run_id, load=load.path)
    return accepted(run_id, 0)


def accepted(run_id: str, seq_id: int) -> OperationAccepted:
    return OperationAccepted(request_id=request_id_of(owner=run_id, seq_id=seq_id), model_id=run_id)


def lora_spec(config: LoraConfig) -> LoraSpec:
    """Raises `UnsuitableLora` where nothing would be trained."""
    if not (config.train_attn or config.train_mlp or config.train_unembed):
        raise UnsuitableLora(
            "lora_config trains nothing; set one of train_attn, train_mlp and train_unembed"
        )
    return LoraSpec(
        rank=config.rank,
        alpha=LORA_ALPHA,
        seed=secrets.randbits(31) if config.seed is None else config.seed,
        attention=config.train_attn,
        mlp=config.train_mlp,
        unembedding=config.train_unembed,
    )


def wants_full_training(user_metadata: Mapping[str, object] | None) -> bool:
    """Return whether the metadata asks for full training, which an unmodified client can do only
    there. Raises `InvalidRequest` for another word."""
    choice = (user_metadata or {}).get(TRAINING_KEY)
    if choice not in (None, "full"):
        raise InvalidRequest(f"user_metadata: {TRAINING_KEY} is {choice!r}; known: 'full'")
    return choice == "full"


def known_optimizer(config: OptimizerConfig | None) -> Literal["adamw", "dimuon"]:
    """Return the optimizer asked for, AdamW by default. Raises `OptimizerSetting`."""
    if config is None:
        return "adamw"
    if config.type == "dimuon" and config.version in (None, 1):
        return "dimuon"
    if config.type == "adamw":
        return "adamw"
    version = f" version {config.version}" if config.version is not None else ""
    raise OptimizerSetting(
        f"the optimizer {config.type!r}{version} is unknown; known: adamw, dimuon version 1"
    )
