"""How a training run begins: anew, or from a saved state."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.wire import (
    SMALL_BODY,
    caller_of,
    gateway_of,
    note_for_audit,
    parse,
    promise,
    read_body,
)
from gateway.auth.identity import Readers
from gateway.checkpoints.compatibility import training_from
from gateway.identifiers import run_id_of, split_model_name
from gateway.runs.operations import LoadWeights
from gateway.sessions.metadata import Metadata
from tandem.errors import InvalidRequest, OptimizerSetting, UnsuitableLora
from tandem.worker import LoraSpec, TrainingSpec

TRAINING_KEY = "tandem_training"
"""The key of `user_metadata` that chooses the kind of training; its only value is `full`."""

LORA_ALPHA = 32.0
"""Whatever the rank: a learning rate then suits adapters of every rank about as well."""


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


async def create_model(request: Request) -> Response:
    """Begins a training run. A user's mistake is answered at once, so that the SDK raises its
    typed error at once."""
    gateway = gateway_of(request)
    raw = await read_body(request, limit=SMALL_BODY)
    body = parse(CreateModel, raw)
    await gateway.access.session(body.session_id, caller_of(request))
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
    note_for_audit(request, target=run_id, base_model=body.base_model)
    return promise(run_id, 0, model_id=run_id)


async def create_via_load(
    request: Request, raw: bytes, *, body: CreateViaLoad, load: LoadWeights, readers: Readers
) -> Response:
    """Begins a run with a saved state, which one of `readers` may read. `raw` is the body as it
    is kept in the log."""
    gateway = gateway_of(request)
    await gateway.access.session(body.session_id, caller_of(request))
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
    note_for_audit(request, target=run_id, load=load.path)
    return promise(run_id, 0, model_id=run_id)


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
    """What an unmodified client can say in metadata. Raises `InvalidRequest` for another word."""
    choice = (user_metadata or {}).get(TRAINING_KEY)
    if choice not in (None, "full"):
        raise InvalidRequest(f"user_metadata: {TRAINING_KEY} is {choice!r}; known: 'full'")
    return choice == "full"


def known_optimizer(config: OptimizerConfig | None) -> Literal["adamw", "dimuon"]:
    """The optimizer asked for, AdamW if none was. Raises `OptimizerSetting`."""
    if config is None:
        return "adamw"
    if config.type == "dimuon" and config.version in (None, 1):
        return "dimuon"
    if config.type == "adamw":
        return "adamw"
    version = f" version {config.version}" if config.version is not None else ""
    raise OptimizerSetting(
        f"the optimizer {config.type!r}{version} is not there; known: adamw, dimuon version 1"
    )
