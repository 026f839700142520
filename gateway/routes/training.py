"""Training runs and the operations of their logs."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Literal

from google.protobuf.message import DecodeError
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from gateway.compatible import training_from
from gateway.execute import check_names
from gateway.names import run_id_of, split_model_name
from gateway.operations import (
    AdamParams,
    Body,
    DimuonParams,
    Kind,
    LoadWeights,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    UseCustomLoss,
)
from gateway.routes.checkpoints import optimizer_config
from gateway.routes.prefix import read_routing_prefix
from gateway.routes.wire import (
    JSON,
    SMALL_BODY,
    BodyTooLarge,
    caller_of,
    gateway_of,
    json_response,
    note_for_audit,
    parse,
    promise,
    read_body,
)
from gateway.sdk_version import json_refused
from tandem.errors import (
    InvalidRequest,
    MalformedPayload,
    OptimizerSetting,
    PayloadTooLarge,
    UnknownRun,
    UnsuitableLora,
    UserError,
)
from tandem.wire.v1 import tinker_pb2
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
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: dict[str, object] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class CreateViaLoad(BaseModel):
    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str | None = None
    user_metadata: dict[str, object] | None = None
    optimizer_config: OptimizerConfig | None = None


class Addressing(BaseModel):
    session_id: str | None = None


class Lent(BaseModel):
    """A key or token of the owner of a checkpoint, who lets others load it."""

    weights_access_token: str | None = None


class Place(BaseModel):
    """Which run, and which place in its log."""

    model_id: str
    seq_id: int = Field(ge=1, le=2**53)


class OptimStepFields(BaseModel):
    adam_params: dict[str, object] | None = None
    optimizer_params: dict[str, object] | None = None


class ModelId(BaseModel):
    model_id: str


async def forward_backward(request: Request) -> Response:
    """Computes a batch's loss, and its gradients unless `forward_only` is set. The body goes
    into the log as it is; the gateway reads the routing fields alone."""
    gateway = gateway_of(request)
    if request.headers.get("content-type", "").startswith(JSON):
        raise json_refused("forward_backward")
    try:
        payload = await read_body(request)
    except BodyTooLarge as error:
        return await _refuse(request, error.prefix, error)
    try:
        routing = tinker_pb2.ForwardBackwardRouting.FromString(payload)
    except DecodeError:
        return await _refuse(
            request,
            payload[:4096],
            MalformedPayload("the body is not a protobuf ForwardBackwardRequest"),
        )
    if not routing.model_id or routing.seq_id < 1:
        raise MalformedPayload(
            "the body is not a ForwardBackwardRequest: model_id or seq_id is missing"
        )
    await gateway.access.run(routing.model_id, caller_of(request))
    await gateway.admission.submit(
        run_id=routing.model_id,
        seq_id=routing.seq_id,
        kind="forward" if routing.forward_only else "forward_backward",
        body=_custom_loss(routing),
        payload=payload,
    )
    return promise(routing.model_id, routing.seq_id, model_id=routing.model_id)


async def optim_step(request: Request) -> Response:
    """Applies the gradients since the last step."""
    return await _submit(request, "optim_step", _optim_step_body)


async def save_weights(request: Request) -> Response:
    """Saves a run's state, to resume from, under a name."""
    return await _submit(request, "save_weights", lambda raw: parse(SaveWeights, raw))


async def save_weights_for_sampler(request: Request) -> Response:
    """Publishes a run's weights for sampling: under a name, or ephemeral."""
    return await _submit(
        request, "save_weights_for_sampler", lambda raw: parse(SaveWeightsForSampler, raw)
    )


async def save_weights_external(request: Request) -> Response:
    """Exports a run's weights for download."""
    return await _submit(
        request, "save_weights_external", lambda raw: parse(SaveWeightsExternal, raw)
    )


async def load_weights(request: Request) -> Response:
    """Loads a saved state into a new run (`session_id`, `model_seq_id`), or into one that is
    there (`model_id`)."""
    raw, token = _without_token(await read_body(request))
    gateway, caller = gateway_of(request), caller_of(request)
    readers = gateway.access.readers(caller, token=token)
    if parse(Addressing, raw).session_id is None:
        return await _submit(
            request,
            "load_weights",
            lambda body: parse(LoadWeights, body).on_behalf_of(readers),
            raw=raw,
        )
    _check_small(raw)
    body = parse(CreateViaLoad, raw)
    load = parse(LoadWeights, raw).on_behalf_of(readers)
    await gateway.access.session(body.session_id, caller)
    asked = _check_optimizer(body.optimizer_config) if body.optimizer_config else None
    checkpoint = await gateway.versions.checkpoints.for_training(load.path, readers=readers)
    name, full = split_model_name(body.base_model or checkpoint.base_model)
    origin = await gateway.versions.checkpoints.origin(checkpoint.path.run_id)
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


async def create_model(request: Request) -> Response:
    """Begins a training run. A user's mistake is answered at once, so that the SDK raises its
    typed error at once."""
    gateway = gateway_of(request)
    raw = await read_body(request, limit=SMALL_BODY)
    body = parse(CreateModel, raw)
    await gateway.access.session(body.session_id, caller_of(request))
    optimizer = _check_optimizer(body.optimizer_config)
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


async def get_info(request: Request) -> Response:
    """What a run trains. Also once the run has ended, as long as its session is active."""
    gateway = gateway_of(request)
    body = parse(ModelId, await read_body(request))
    await gateway.access.run(body.model_id, caller_of(request))
    run = gateway.runs.get(body.model_id)
    if run is None:
        raise UnknownRun(f"training run {body.model_id!r} does not run on this server")
    lora = run.training.lora
    return json_response(
        {
            "type": "get_info",
            "model_id": run.id,
            "model_name": run.model.name,
            "is_lora": lora is not None,
            "lora_rank": lora.rank if lora is not None else None,
            "model_data": {
                "arch": run.architecture or None,
                "model_name": run.model.name,
                # The SDK takes it as it is, where it would cut a name or a path in pieces.
                "tokenizer_id": run.model.path,
            },
            "optimizer_config": optimizer_config(run.training.optimizer),
        }
    )


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


def _without_token(raw: bytes) -> tuple[bytes, str | None]:
    """The body as it is kept in the log, and the key or token in it, which is not."""
    token = parse(Lent, raw).weights_access_token
    if token is None:
        return raw, None
    fields = json.loads(raw)  # which takes what pydantic takes: NaN, and numbers of any size
    del fields["weights_access_token"]
    return json.dumps(fields).encode(), token


async def _submit(
    request: Request, kind: Kind, read: Callable[[bytes], Body], *, raw: bytes | None = None
) -> Response:
    """A body with wrong fields still takes its place in the log, and fails at its turn.

    `raw` is the body where it was read already: it can be read only once.
    """
    gateway = gateway_of(request)
    if raw is None:
        raw = await read_body(request)
    place = parse(Place, raw)
    await gateway.access.run(place.model_id, caller_of(request))
    body: Body | None = None
    refused: UserError | None = None
    try:
        _check_small(raw)
        body = read(raw)
        check_names(body)
        note_for_audit(request, target=_target(place.model_id, body))
    except UserError as error:
        refused = error
    await gateway.admission.submit(
        run_id=place.model_id,
        seq_id=place.seq_id,
        kind=kind,
        body=body,
        request=b"" if isinstance(refused, PayloadTooLarge) else raw,
        refused=refused,
    )
    return promise(place.model_id, place.seq_id, model_id=place.model_id)


def _check_small(raw: bytes) -> None:
    """Of what memory and the log hold until its turn. Raises `PayloadTooLarge`."""
    if len(raw) > SMALL_BODY:
        raise PayloadTooLarge(f"the request has {len(raw)} bytes, {SMALL_BODY} at most")


def _target(run_id: str, body: Body) -> str:
    """What the audit log calls the thing that is saved or loaded."""
    match body:
        case LoadWeights():
            return body.path
        case SaveWeights():
            return f"tinker://{run_id}/weights/{body.path}"
        case SaveWeightsForSampler(path=str(name)):
            return f"tinker://{run_id}/sampler_weights/{name}"
        case SaveWeightsExternal():
            return f"tinker://{run_id}/external_weights/{body.path}"
        case _:
            return run_id


async def _refuse(request: Request, prefix: bytes, error: UserError) -> Response:
    """Refuses a forward_backward whose body cannot be taken. Where its first bytes say which
    place in the log it has, it takes that place, so that those behind it do not wait."""
    routing = read_routing_prefix(prefix)
    if routing is None:
        raise error
    gateway = gateway_of(request)
    await gateway.access.run(routing.run_id, caller_of(request))
    await gateway.admission.submit(
        run_id=routing.run_id, seq_id=routing.seq_id, kind="forward_backward", refused=error
    )
    raise error


def _custom_loss(routing: tinker_pb2.ForwardBackwardRouting) -> UseCustomLoss | None:
    """Which custom loss is meant. Without an id the trainer says what is missing."""
    value = routing.loss_fn_config_v2.get("loss_id")
    if routing.loss_fn != "custom" or value is None:
        return None
    return UseCustomLoss(loss_id=value.text)


def _optim_step_body(raw: bytes) -> OptimStep:
    """The SDK sends `adam_params`, or `optimizer_params` with the type of another optimizer."""
    fields = parse(OptimStepFields, raw)
    if (fields.adam_params is None) == (fields.optimizer_params is None):
        raise OptimizerSetting("a step takes either adam_params or optimizer_params")
    try:
        if fields.adam_params is not None:
            where = "adam_params"
            return OptimStep(params=AdamParams.model_validate(fields.adam_params))
        where = "optimizer_params"
        assert fields.optimizer_params is not None
        _check_optimizer(OptimizerConfig.model_validate(fields.optimizer_params))
        if fields.optimizer_params.get("type") == "dimuon":
            return OptimStep(params=DimuonParams.model_validate(fields.optimizer_params))
        return OptimStep(params=AdamParams.model_validate(fields.optimizer_params))
    except ValidationError as error:
        raise OptimizerSetting(f"{where}: {_first_line(error)}") from error


def _check_optimizer(config: OptimizerConfig | None) -> Literal["adamw", "dimuon"]:
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


def _first_line(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    return ": ".join([".".join(str(part) for part in first["loc"]), first["msg"]])
