"""The operations of a run's journal.

A wrong body with a valid run and sequence number is accepted and fails at its turn. Otherwise later
operations would wait for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, TypeVar

from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from gateway.api.dependencies import Access, AccessDep
from gateway.api.request_body import (
    JSON,
    PAYLOAD_BODY,
    PROTOBUF,
    SMALL_BODY,
    BodyTooLarge,
    BoundedRequest,
    first_fault,
    validate,
)
from gateway.api.routing import Refuses, Router, binary, json_content, model_response
from gateway.api.tinker.batch_routing import ROUTING_BYTES, routing_of
from gateway.api.tinker.json_bodies import ForwardBackward, read_batch
from gateway.api.tinker.service import ASKS
from gateway.api.tinker.training_runs import (
    OperationAccepted,
    OptimizerConfig,
    accepted,
    known_optimizer,
    model_of,
)
from gateway.checkpoints.compatibility import training_from
from gateway.identifiers import run_id_of
from gateway.owners.sessions.registry import RunMetadata
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
    SequenceTaken,
    SessionFinished,
    UnknownModel,
    UnknownRun,
    UnknownSession,
    UnknownWeights,
    UserError,
)
from tandem.wire.v1 import tinker_pb2

_LATER = (
    "A body that names its run and its sequence number but is wrong otherwise is accepted, takes "
    "that number in the run's journal, and fails there: `retrieve_future` says why."
)

_LONGEST_LOSS_NAME = 256
"""Characters of a loss name or id. The journal keeps both for a month."""

Saved = TypeVar("Saved", SaveWeights, SaveWeightsForSampler, SaveWeightsExternal)

router = Router("/api/v1", tag="SDK")


class Addressed(BaseModel):
    """A request with a sequence number in a run's journal. The other fields are read later."""

    model_config = ConfigDict(extra="allow")

    model_id: str
    seq_id: int = Field(ge=1, le=2**53)


class AddressedOrNew(BaseModel):
    """A run and a sequence number in its journal, or the session of a new run."""

    model_config = ConfigDict(extra="allow")

    session_id: str | None = None
    weights_access_token: str | None = Field(
        None, description="A key or token of the checkpoint's owner, who lends it"
    )


class CreateViaLoad(BaseModel):
    session_id: str
    model_seq_id: int = Field(ge=0, lt=10**18)
    base_model: str | None = None
    user_metadata: RunMetadata | None = None
    optimizer_config: OptimizerConfig | None = None


class OptimStepFields(BaseModel):
    adam_params: dict[str, object] | None = None
    optimizer_params: dict[str, object] | None = None


_SAME = (
    "A repeated `seq_id` must come with the same body; it is answered with the first `request_id`."
)
_JOURNAL = Refuses(UnknownRun, SessionFinished, SequenceTaken, Overloaded, rules=[_LATER, _SAME])


async def _submit(
    access: Access,
    addressed: Addressed,
    kind: Kind,
    read: Callable[[dict[str, object]], Body],
    *,
    raw: bytes | None = None,
) -> OperationAccepted:
    """Put an operation into the run's journal, or its failure if `read` refuses its fields. `raw`
    is the body for the journal, if not all of it."""
    raw = await access.raw_body() if raw is None else raw
    run_id, seq_id = addressed.model_id, addressed.seq_id
    await access.run(run_id)
    body: Body | None = None
    refused: UserError | None = None
    try:
        check_small(raw)
        body = read(addressed.model_extra or {})
        check_body(body)
        access.audit.note(_target(run_id, body))
    except UserError as error:
        refused = error
    await access.gateway.admission.submit(
        run_id=run_id,
        seq_id=seq_id,
        kind=kind,
        body=body,
        request=b"" if isinstance(refused, PayloadTooLarge) else _unchanging(raw, body),
        refused=refused,
    )
    return accepted(run_id, seq_id)


def _unchanging(raw: bytes, body: Body | None) -> bytes:
    """Return the part of the body that is equal in repetitions. The SDK repeats an ephemeral save
    with a new sampling session number."""
    if not isinstance(body, SaveWeightsForSampler) or body.sampling_session_seq_id is None:
        return raw
    return json.dumps(json.loads(raw) | {"sampling_session_seq_id": 0}).encode()


# Raw: the journal stores the protobuf unchanged. The endpoint reads the first bytes of a body that
# is too large, which FastAPI would refuse.
@router.operation(
    "POST",
    "/forward_backward",
    role="ci",
    audit=None,
    errors=[UnknownRun, SessionFinished, SequenceTaken, Overloaded],
    rules=[_LATER, _SAME, "The body must name a run and a sequence number of at least 1."],
    bounds=PAYLOAD_BODY,
    raw={
        PROTOBUF: {
            "schema": binary("ForwardBackwardRequest of protos/tandem/wire/v1/tinker.proto")
        },
        **json_content(ForwardBackward),
    },
    responses={200: {"model": OperationAccepted}},
)
async def forward_backward(request: BoundedRequest) -> Response:
    """Compute a batch's loss, and its gradients unless `forward_only` is set."""
    # A refused body uses the sequence number in its first bytes, so that later operations do not
    # wait.
    payload: bytes | None = None
    refused: UserError | None = None
    try:
        if request.headers.get("content-type", "").startswith(JSON):
            read = partial(read_batch, most_values=request.most_values)
            routing, payload, refused = await request.read(read)
        else:
            payload = await request.body()
            routing = await request.read(routing_of)
    except BodyTooLarge as error:
        refused, payload, routing = error, None, _routing_in(error.prefix)
    except DecodeError:
        refused = MalformedPayload("the body is not a protobuf ForwardBackwardRequest")
        payload, routing = None, _routing_in(payload or b"")
    if not _is_complete(routing):
        raise refused or MalformedPayload(
            "the body is not a ForwardBackwardRequest: model_id or seq_id is missing"
        )
    access = Access(request)
    await access.run(routing.model_id)
    # The registered loss, if any. The trainer refuses a missing id.
    loss = routing.loss_fn_config_v2.get("loss_id")
    if loss is not None and max(len(routing.loss_fn), len(loss.text)) > _LONGEST_LOSS_NAME:
        refused = MalformedPayload(
            f"loss_fn and loss_id have at most {_LONGEST_LOSS_NAME} characters each"
        )
        payload = loss = None
    await access.gateway.admission.submit(
        run_id=routing.model_id,
        seq_id=routing.seq_id,
        kind="forward" if routing.forward_only else "forward_backward",
        body=None if loss is None else LossReference(loss_fn=routing.loss_fn, loss_id=loss.text),
        payload=payload,
        refused=refused,
    )
    if refused is not None:
        raise refused
    return model_response(accepted(routing.model_id, routing.seq_id))


@router.operation(
    "POST",
    "/optim_step",
    role="ci",
    audit=None,
    rules=["A step takes either `adam_params` or `optimizer_params`."],
    body_schema=OptimStepFields,
)
async def optim_step(body: Annotated[Addressed, _JOURNAL], access: AccessDep) -> OperationAccepted:
    """Apply the gradients since the last step."""
    return await _submit(access, body, "optim_step", _optim_step)


def _add_save(kind: Kind, fields: type[Saved], about: str) -> None:
    async def save(body: Annotated[Addressed, _JOURNAL], access: AccessDep) -> OperationAccepted:
        return await _submit(access, body, kind, partial(validate, fields))

    save.__name__, save.__doc__ = kind, about
    router.operation("POST", f"/{kind}", role="ci", audit="checkpoint_write", body_schema=fields)(
        save
    )


_add_save("save_weights", SaveWeights, "Save a run's state, to resume from, under a name.")
_add_save(
    "save_weights_for_sampler",
    SaveWeightsForSampler,
    "Publish a run's weights for sampling: under a name, or ephemeral.",
)
_add_save("save_weights_external", SaveWeightsExternal, "Export a run's weights for download.")


@router.operation(
    "POST",
    "/load_weights",
    role="ci",
    audit="checkpoint_read",
    errors=[UnknownSession, UnknownModel, UnknownWeights],
    rules=[
        "Without a `session_id`, a run (`model_id`) and a sequence number (`seq_id`) are needed. "
        "A new run is made where `session_id` is given; its path must be that of a training "
        "checkpoint that fits the model and the training asked for.",
        ASKS,
    ],
    body_schema=LoadWeights,
)
async def load_weights(
    body: Annotated[AddressedOrNew, _JOURNAL], access: AccessDep
) -> OperationAccepted:
    """Load a saved state into a new run (`session_id`, `model_seq_id`), or into an existing one
    (`model_id`)."""
    gateway, raw = access.gateway, await access.raw_body()
    readers = access.readers(token=body.weights_access_token)
    fields = body.model_dump(exclude={"weights_access_token"}, exclude_unset=True)
    if "weights_access_token" in body.model_fields_set:  # the journal must not store the token
        raw = json.dumps(fields).encode()

    def read(fields: dict[str, object]) -> LoadWeights:
        return validate(LoadWeights, fields).on_behalf_of(readers)

    if body.session_id is None:
        return await _submit(access, validate(Addressed, fields), "load_weights", read, raw=raw)
    check_small(raw)
    new, load = validate(CreateViaLoad, fields), read(fields)
    await access.session_for_run(new.session_id, new.user_metadata)
    asked = known_optimizer(new.optimizer_config) if new.optimizer_config else None
    async with gateway.checkpoints.reading(
        load.path, readers=readers, trainable=True
    ) as checkpoint:
        model, full = model_of(gateway, new.base_model or checkpoint.base_model, new.user_metadata)
        saved = (await gateway.checkpoints.origin(checkpoint.path.run_id)).training
        await gateway.runs.create(
            session_id=new.session_id,
            model_seq_id=new.model_seq_id,
            model=model,
            training=training_from(
                path=load.path, saved=saved, full=full, optimizer=load.optimizer, asked=asked
            ),
            load=load,
            loaded=checkpoint.folder,
            user_metadata=new.user_metadata,
            request=raw,
            admin=access.caller.role == "admin",
        )
    run_id = run_id_of(session_id=new.session_id, model_seq_id=new.model_seq_id)
    access.audit.note(run_id, load=load.path)
    return accepted(run_id, 0)


def check_small(raw: bytes) -> None:
    """Bound the memory and the journal until the operation's turn. Raises `PayloadTooLarge`."""
    if len(raw) > SMALL_BODY:
        raise PayloadTooLarge(f"the request has {len(raw)} bytes, {SMALL_BODY} at most")


def _target(run_id: str, body: Body) -> str:
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
    given = {name: one for name, one in validate(OptimStepFields, fields) if one is not None}
    if len(given) != 1:
        raise OptimizerSetting("a step takes either adam_params or optimizer_params")
    [(where, params)] = given.items()
    kind: type[AdamParams | DimuonParams] = AdamParams
    try:
        if where == "optimizer_params":
            name = known_optimizer(OptimizerConfig.model_validate(params))
            kind = DimuonParams if name == "dimuon" else AdamParams
        return OptimStep(params=kind.model_validate(params))
    except ValidationError as error:
        raise OptimizerSetting(f"{where}: {first_fault(error)}") from error


def _routing_in(prefix: bytes) -> tinker_pb2.ForwardBackwardRouting:
    """Read the run id and the seq_id from the first bytes of a broken message, if it begins with
    them. Protobuf writers order fields by number, and these are the first two."""
    for end in range(4, min(len(prefix), ROUTING_BYTES) + 1):
        with suppress(DecodeError):  # cut within a field
            routing = tinker_pb2.ForwardBackwardRouting.FromString(prefix[:end])
            if _is_complete(routing):
                return routing
    return tinker_pb2.ForwardBackwardRouting()


def _is_complete(routing: tinker_pb2.ForwardBackwardRouting) -> bool:
    return bool(routing.model_id) and routing.seq_id >= 1
