"""The operations of a run's log, and what a run trains."""

from __future__ import annotations

import json
from collections.abc import Callable

from google.protobuf.message import DecodeError
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.tinker.checkpoints import optimizer_config
from gateway.api.tinker.create_model import (
    CreateViaLoad,
    OptimizerConfig,
    create_via_load,
    known_optimizer,
)
from gateway.api.tinker.routing_prefix import read_routing_prefix
from gateway.api.tinker.sdk_version import json_refused
from gateway.api.wire import (
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
from gateway.runs.operations import (
    AdamParams,
    Body,
    DimuonParams,
    Kind,
    LoadWeights,
    LossReference,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    check_body,
)
from tandem.errors import (
    MalformedPayload,
    OptimizerSetting,
    PayloadTooLarge,
    UnknownRun,
    UserError,
)
from tandem.wire.v1 import tinker_pb2


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
    await gateway.runs.submit(
        run_id=routing.model_id,
        seq_id=routing.seq_id,
        kind="forward" if routing.forward_only else "forward_backward",
        body=_loss_reference(routing),
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
    return await create_via_load(
        request,
        raw,
        body=parse(CreateViaLoad, raw),
        load=parse(LoadWeights, raw).on_behalf_of(readers),
        readers=readers,
    )


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


def _without_token(raw: bytes) -> tuple[bytes, str | None]:
    """The body as it is kept in the log, and the key or token in it, which is not."""
    token = parse(Lent, raw).weights_access_token
    fields = json.loads(raw)  # which takes what pydantic takes: NaN, and numbers of any size
    if "weights_access_token" not in fields:
        return raw, None
    del fields["weights_access_token"]  # however often it is there: the last one counts, for both
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
        check_body(body)
        note_for_audit(request, target=_target(place.model_id, body))
    except UserError as error:
        refused = error
    await gateway.runs.submit(
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
    await gateway.runs.submit(
        run_id=routing.run_id, seq_id=routing.seq_id, kind="forward_backward", refused=error
    )
    raise error


def _loss_reference(routing: tinker_pb2.ForwardBackwardRouting) -> LossReference | None:
    """Return which registered loss is meant, if any; the trainer refuses a missing id."""
    value = routing.loss_fn_config_v2.get("loss_id")
    return None if value is None else LossReference(loss_fn=routing.loss_fn, loss_id=value.text)


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
        known_optimizer(OptimizerConfig.model_validate(fields.optimizer_params))
        if fields.optimizer_params.get("type") == "dimuon":
            return OptimStep(params=DimuonParams.model_validate(fields.optimizer_params))
        return OptimStep(params=AdamParams.model_validate(fields.optimizer_params))
    except ValidationError as error:
        raise OptimizerSetting(f"{where}: {_first_line(error)}") from error


def _first_line(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    return ": ".join([".".join(str(part) for part in first["loc"]), first["msg"]])
