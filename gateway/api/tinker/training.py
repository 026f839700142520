"""The operations of a run's journal, and what a run trains.

A body that names its run and its sequence number but is wrong otherwise is accepted, takes that
number, and fails at its turn, so that the operations after it do not wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from fastapi import Depends
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.dependencies import (
    Access,
    AccessDep,
    AuditNote,
    GatewayDep,
    access_of,
    audit_note_of,
)
from gateway.api.fields import Answer
from gateway.api.request_body import (
    JSON,
    PREFIX_BYTES,
    PROTOBUF,
    SMALL_BODY,
    BodyTooLarge,
    first_fault,
    parse_json,
    validate,
)
from gateway.api.routing import Refuses, Router, binary, model_response
from gateway.api.tinker.checkpoints import OptimizerName, optimizer_name
from gateway.api.tinker.create_model import (
    CreateViaLoad,
    OperationAccepted,
    OptimizerConfig,
    accepted,
    create_via_load,
    known_optimizer,
)
from gateway.api.tinker.service import json_refused
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
    Overloaded,
    PayloadTooLarge,
    SessionFinished,
    UnknownModel,
    UnknownRun,
    UnknownSession,
    UnknownWeights,
    UserError,
)
from tandem.wire.v1 import tinker_pb2

PROTO = "protos/tandem/wire/v1/tinker.proto"
_LATER = (
    "A body that names its run and its sequence number but is wrong otherwise is accepted, takes "
    "that number in the run's journal, and fails there: `retrieve_future` says why."
)

_ROUTING_BYTES = 256
"""More than the two fields take that say whose operation a forward_backward is."""

router = Router("/api/v1", tag="SDK")


class Addressed(BaseModel):
    """A request with a sequence number in a run's journal. The other fields are read later."""

    model_config = ConfigDict(extra="allow")

    model_id: str
    seq_id: int = Field(ge=1, le=2**53)


class AddressedOrNew(BaseModel):
    """Either a run and a sequence number in its journal, or the session of a new run."""

    model_config = ConfigDict(extra="allow")

    session_id: str | None = None
    weights_access_token: str | None = Field(
        None, description="A key or token of the checkpoint's owner, who lends it"
    )


class OptimStepFields(BaseModel):
    adam_params: dict[str, object] | None = None
    optimizer_params: dict[str, object] | None = None


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


@dataclass(frozen=True)
class Submitter:
    """Puts an operation of the caller into its run's journal."""

    access: Access
    audit: AuditNote
    raw: bytes

    async def submit(
        self,
        addressed: Addressed,
        kind: Kind,
        read: Callable[[dict[str, object]], Body],
        *,
        raw: bytes | None = None,
    ) -> OperationAccepted:
        """Accept the operation, or, where `read` refuses its fields, its failure.

        `raw` is what the journal keeps of the body, where that is not all of it.
        """
        raw = self.raw if raw is None else raw
        await self.access.run(addressed.model_id)
        body: Body | None = None
        refused: UserError | None = None
        try:
            check_small(raw)
            body = read(addressed.model_extra or {})
            check_body(body)
            self.audit.note(_target(addressed.model_id, body))
        except UserError as error:
            refused = error
        await self.access.gateway.runs.submit(
            run_id=addressed.model_id,
            seq_id=addressed.seq_id,
            kind=kind,
            body=body,
            request=b"" if isinstance(refused, PayloadTooLarge) else raw,
            refused=refused,
        )
        return accepted(addressed.model_id, addressed.seq_id)


async def _submitter(request: Request) -> Submitter:
    """One dependency rather than three: each takes FastAPI about 8 us, and optim_step is hot."""
    return Submitter(
        access=access_of(request), audit=audit_note_of(request), raw=await request.body()
    )


SubmitterDep = Annotated[
    Submitter,
    Depends(_submitter),
    Refuses(UnknownRun, SessionFinished, Overloaded, rules=[_LATER]),
]


# Raw: a protobuf that goes into the journal as it came; the gateway decodes its routing fields
# only, and must see the first bytes of one that is too large. 75 us for 1 MB, and 121 us by
# FastAPI with the body as bytes (median of 600 calls in process, both ways in turn).
@router.operation(
    "POST",
    "/forward_backward",
    role="member",
    audit=None,
    errors=[UnknownRun, SessionFinished, Overloaded],
    rules=[_LATER, "The body must name a run and a sequence number of at least 1."],
    raw={
        PROTOBUF: {"schema": binary("ForwardBackwardRequest of protos/tandem/wire/v1/tinker.proto")}
    },
    responses={200: {"model": OperationAccepted}},
)
async def forward_backward(request: Request) -> Response:
    """Compute a batch's loss, and its gradients unless `forward_only` is set."""
    if request.headers.get("content-type", "").startswith(JSON):
        raise json_refused("forward_backward")
    try:
        payload = await request.body()
    except BodyTooLarge as error:
        return await _refuse(request, error.prefix, error)
    try:
        routing = tinker_pb2.ForwardBackwardRouting.FromString(payload)
    except DecodeError:
        return await _refuse(
            request,
            payload[:PREFIX_BYTES],
            MalformedPayload("the body is not a protobuf ForwardBackwardRequest"),
        )
    if not routing.model_id or routing.seq_id < 1:
        raise MalformedPayload(
            "the body is not a ForwardBackwardRequest: model_id or seq_id is missing"
        )
    access = access_of(request)
    await access.run(routing.model_id)
    await access.gateway.runs.submit(
        run_id=routing.model_id,
        seq_id=routing.seq_id,
        kind="forward" if routing.forward_only else "forward_backward",
        body=_loss_reference(routing),
        payload=payload,
    )
    return model_response(accepted(routing.model_id, routing.seq_id))


@router.operation(
    "POST",
    "/optim_step",
    role="member",
    audit=None,
    rules=["A step takes either `adam_params` or `optimizer_params`."],
    body_schema=OptimStepFields,
)
async def optim_step(body: Addressed, submitter: SubmitterDep) -> OperationAccepted:
    """Apply the gradients since the last step."""
    return await submitter.submit(body, "optim_step", _optim_step)


@router.operation(
    "POST", "/save_weights", role="member", audit="checkpoint_write", body_schema=SaveWeights
)
async def save_weights(body: Addressed, submitter: SubmitterDep) -> OperationAccepted:
    """Save a run's state, to resume from, under a name."""
    return await submitter.submit(body, "save_weights", partial(validate, SaveWeights))


@router.operation(
    "POST",
    "/save_weights_for_sampler",
    role="member",
    audit="checkpoint_write",
    body_schema=SaveWeightsForSampler,
)
async def save_weights_for_sampler(body: Addressed, submitter: SubmitterDep) -> OperationAccepted:
    """Publish a run's weights for sampling: under a name, or ephemeral."""
    read = partial(validate, SaveWeightsForSampler)
    return await submitter.submit(body, "save_weights_for_sampler", read)


@router.operation(
    "POST",
    "/save_weights_external",
    role="member",
    audit="checkpoint_write",
    body_schema=SaveWeightsExternal,
)
async def save_weights_external(body: Addressed, submitter: SubmitterDep) -> OperationAccepted:
    """Export a run's weights for download."""
    read = partial(validate, SaveWeightsExternal)
    return await submitter.submit(body, "save_weights_external", read)


@router.operation(
    "POST",
    "/load_weights",
    role="member",
    audit="checkpoint_read",
    errors=[UnknownSession, UnknownModel, UnknownWeights],
    rules=[
        "Without a `session_id`, a run (`model_id`) and a sequence number (`seq_id`) are needed. "
        "A new run is made where `session_id` is given; its path must be that of a training "
        "checkpoint that fits the model and the training asked for.",
    ],
    body_schema=LoadWeights,
)
async def load_weights(body: AddressedOrNew, submitter: SubmitterDep) -> OperationAccepted:
    """Load a saved state into a new run (`session_id`, `model_seq_id`), or into an existing one
    (`model_id`)."""
    readers = submitter.access.readers(token=body.weights_access_token)
    raw, fields = _without_token(submitter.raw)

    def read(fields: dict[str, object]) -> LoadWeights:
        return validate(LoadWeights, fields).on_behalf_of(readers)

    if body.session_id is None:
        return await submitter.submit(validate(Addressed, fields), "load_weights", read, raw=raw)
    check_small(raw)
    new, load = validate(CreateViaLoad, fields), read(fields)
    await submitter.access.session(new.session_id)
    return await create_via_load(
        submitter.access.gateway, raw, body=new, load=load, readers=readers, audit=submitter.audit
    )


@router.operation(
    "POST", "/get_info", role="reader", audit=None, errors=[UnknownRun, SessionFinished]
)
async def get_info(body: ModelId, gateway: GatewayDep, access: AccessDep) -> TrainingInfo:
    """Return what a run trains; also once it has ended, while its session is active."""
    await access.run(body.model_id)
    run = gateway.runs.get(body.model_id)
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
            arch=run.architecture or None,
            model_name=run.model.name,
            # The SDK takes it as it is, where it would cut a name or a path in pieces.
            tokenizer_id=run.model.path,
        ),
        optimizer_config=optimizer_name(run.training.optimizer),
    )


def check_small(raw: bytes) -> None:
    """Bound what memory and the journal hold until its turn. Raises `PayloadTooLarge`."""
    if len(raw) > SMALL_BODY:
        raise PayloadTooLarge(f"the request has {len(raw)} bytes, {SMALL_BODY} at most")


def _without_token(raw: bytes) -> tuple[bytes, dict[str, object]]:
    """Return the body as the journal keeps it, without the key or token in it, and its fields.

    The token is removed however often it occurs and however its name is escaped.
    """
    fields = parse_json(raw)
    assert isinstance(fields, dict)
    if "weights_access_token" in fields:
        del fields["weights_access_token"]
        raw = json.dumps(fields).encode()  # which writes what pydantic reads: NaN, large numbers
    return raw, fields


def _target(run_id: str, body: Body) -> str:
    """Return what the audit log calls the thing that is saved or loaded."""
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


def _optim_step(fields: dict[str, object]) -> OptimStep:
    """The SDK sends `adam_params`, or `optimizer_params` with the type of another optimizer."""
    step = validate(OptimStepFields, fields)
    if (step.adam_params is None) == (step.optimizer_params is None):
        raise OptimizerSetting("a step takes either adam_params or optimizer_params")
    try:
        if step.adam_params is not None:
            where = "adam_params"
            return OptimStep(params=AdamParams.model_validate(step.adam_params))
        where = "optimizer_params"
        assert step.optimizer_params is not None
        known_optimizer(OptimizerConfig.model_validate(step.optimizer_params))
        if step.optimizer_params.get("type") == "dimuon":
            return OptimStep(params=DimuonParams.model_validate(step.optimizer_params))
        return OptimStep(params=AdamParams.model_validate(step.optimizer_params))
    except ValidationError as error:
        raise OptimizerSetting(f"{where}: {first_fault(error)}") from error


def _loss_reference(routing: tinker_pb2.ForwardBackwardRouting) -> LossReference | None:
    """Return which registered loss is meant, if any; the trainer refuses a missing id."""
    value = routing.loss_fn_config_v2.get("loss_id")
    return None if value is None else LossReference(loss_fn=routing.loss_fn, loss_id=value.text)


async def _refuse(request: Request, prefix: bytes, error: UserError) -> Response:
    """Refuse a forward_backward whose body cannot be taken. Where its first bytes name its
    sequence number, it takes that, so that the operations after it do not wait."""
    routing = _routing_in(prefix)
    if routing is None:
        raise error
    access = access_of(request)
    await access.run(routing.model_id)
    await access.gateway.runs.submit(
        run_id=routing.model_id, seq_id=routing.seq_id, kind="forward_backward", refused=error
    )
    raise error


def _routing_in(prefix: bytes) -> tinker_pb2.ForwardBackwardRouting | None:
    """Read the run id and the seq_id from the first bytes of a message that cannot be parsed;
    None where it does not begin with them. Protobuf writers put fields in the order of their
    numbers, and these are the first two."""
    for end in range(4, min(len(prefix), _ROUTING_BYTES) + 1):
        with suppress(DecodeError):  # it is cut within a field
            routing = tinker_pb2.ForwardBackwardRouting.FromString(prefix[:end])
            if routing.model_id and routing.seq_id >= 1:
                return routing
    return None
