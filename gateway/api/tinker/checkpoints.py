"""Checkpoints: lists, publishing, times to live, deletion, copies and download addresses."""

from __future__ import annotations

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.wire import (
    address_of,
    caller_of,
    gateway_of,
    iso,
    json_response,
    note_for_audit,
    parse,
    parse_query,
    read_body,
)
from gateway.checkpoints.catalog import Checkpoint
from gateway.checkpoints.copies import CopyRequest
from gateway.identifiers import check_ttl, checkpoint_path, run_id_of
from tandem.errors import InvalidRequest

_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_LARGEST_PAGE = 10_000


class CheckpointsQuery(BaseModel):
    """A page of more than 10,000 is one of 10,000."""

    limit: int = Field(100, ge=0, lt=10**12)
    offset: int = Field(0, ge=0, lt=10**12)


class FilesQuery(BaseModel):
    path: str


class TinkerPath(BaseModel):
    tinker_path: str


class Ttl(BaseModel):
    """Without a default: to leave the field out would remove a time to live by accident."""

    ttl_seconds: int | None


class CopyWeights(BaseModel):
    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0, lt=10**18)
    destination_project_id: str | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


async def run_checkpoints(request: Request) -> Response:
    """The checkpoints of one run, oldest first."""
    gateway, caller = gateway_of(request), caller_of(request)
    run = await gateway.directory.run(request.path_params["run_id"], caller, scope="accessible")
    found = await gateway.checkpoints.of_run(run.id)
    return json_response(
        {"checkpoints": [described(c) for c in found if c.public or caller.may_see(c.owner)]}
    )


async def user_checkpoints(request: Request) -> Response:
    """A page of all checkpoints that the user has, newest first."""
    gateway = gateway_of(request)
    query = parse_query(CheckpointsQuery, request)
    limit, offset = min(query.limit, _LARGEST_PAGE), query.offset
    found, total = await gateway.checkpoints.of_owner(
        caller_of(request).owner, limit=limit, offset=offset
    )
    return json_response(
        {
            "checkpoints": [described(c) for c in found],
            "cursor": {"offset": offset, "limit": limit, "total_count": total},
        }
    )


async def delete_checkpoint(request: Request) -> Response:
    """Deletes a checkpoint and its files."""
    checkpoint = await _named(request)
    await gateway_of(request).checkpoints.delete(checkpoint)
    return Response(status_code=204)


async def publish_checkpoint(request: Request) -> Response:
    """Lets everybody with a key read it. Also when it is published already: nothing is wrong
    then."""
    return await _set_public(request, public=True)


async def unpublish_checkpoint(request: Request) -> Response:
    """Takes a published checkpoint back to its owner alone."""
    return await _set_public(request, public=False)


async def set_checkpoint_ttl(request: Request) -> Response:
    """Sets when a checkpoint expires. Counted from now; null: it does not expire any more."""
    body = parse(Ttl, await read_body(request))
    check_ttl(body.ttl_seconds)
    checkpoint = await _named(request)
    await gateway_of(request).checkpoints.set_ttl(checkpoint, body.ttl_seconds)
    return Response(status_code=204)


async def external_weights_urls(request: Request) -> Response:
    """Signed addresses of the files of an export, which need no key for an hour."""
    checkpoint = await _named(request, change=False)
    if checkpoint.path.kind != "external_weights":
        raise InvalidRequest(
            f"{checkpoint.path} is not for download; export the weights with "
            "save_weights_external (`tinker checkpoint download` does that for a training "
            "checkpoint)"
        )
    return await _signed(request, checkpoint)


async def checkpoint_files(request: Request) -> Response:
    """As `external_weights_urls`, for a checkpoint of any kind (`?path=tinker://…`)."""
    path = parse_query(FilesQuery, request).path
    checkpoint = await gateway_of(request).access.checkpoint(path, caller_of(request))
    return await _signed(request, checkpoint)


async def weights_info(request: Request) -> Response:
    """What a client has to know to load a checkpoint."""
    gateway = gateway_of(request)
    body = parse(TinkerPath, await read_body(request))
    checkpoint = await gateway.access.checkpoint(body.tinker_path, caller_of(request))
    training = (await gateway.checkpoints.origin(checkpoint.path.run_id)).training
    lora = training.lora
    info: dict[str, object] = {
        "base_model": checkpoint.base_model,
        "is_lora": lora is not None,
        "optimizer_config": optimizer_config(training.optimizer),
    }
    if lora is not None:
        info |= {
            "lora_rank": lora.rank,
            "train_unembed": lora.unembedding,
            "train_mlp": lora.mlp,
            "train_attn": lora.attention,
        }
    return json_response(info)


async def copy_weights(request: Request) -> Response:
    """Copies a checkpoint into a project, or into a session. Answers when it is copied."""
    gateway, caller = gateway_of(request), caller_of(request)
    body = parse(CopyWeights, await read_body(request))
    check_ttl(body.ttl_seconds)
    token = request.headers.get("x-tinker-weights-access-token") or body.weights_access_token
    readers = gateway.access.readers(caller, token=token)
    await gateway.checkpoints.get(body.source_path, readers=readers)
    owner, run_id, project_id = caller.owner, None, body.destination_project_id or ""
    if body.session_id is not None:
        if body.model_seq_id is None:
            raise InvalidRequest("copy_weights with a session_id needs a model_seq_id, too")
        # A copy in a session is of the session's project, and of its owner.
        session = await gateway.access.session(body.session_id, caller)
        owner, project_id = session.owner, session.project_id
        run_id = run_id_of(session_id=body.session_id, model_seq_id=body.model_seq_id)
    elif not project_id:
        raise InvalidRequest(
            "copy_weights needs a destination_project_id, or a session_id and a model_seq_id"
        )
    path = await gateway.copies.copy(
        CopyRequest(
            source=body.source_path,
            readers=readers,
            owner=owner,
            project_id=project_id,
            run_id=run_id,
            ttl_seconds=body.ttl_seconds,
            idempotency_key=request.headers.get("x-idempotency-key", ""),
        )
    )
    note_for_audit(request, target=path, source=body.source_path)
    return json_response({"tinker_path": path})


def optimizer_config(name: str) -> dict[str, object]:
    """As the SDK has it: Dimuon has a version."""
    return {"type": name, "version": 1} if name == "dimuon" else {"type": name}


async def _named(request: Request, *, change: bool = True) -> Checkpoint:
    """The checkpoint that the address names, and that the caller may read, or `change`. Raises
    `UnknownWeights` or `InvalidRequest`."""
    given = request.path_params
    path = checkpoint_path(run_id=given["run_id"], kind=given["kind"], name=given["name"])
    access = gateway_of(request).access
    find = access.own_checkpoint if change else access.checkpoint
    return await find(path, caller_of(request))


async def _set_public(request: Request, *, public: bool) -> Response:
    checkpoint = await _named(request)
    await gateway_of(request).checkpoints.set_public(checkpoint, public=public)
    return Response(status_code=204)


async def _signed(request: Request, checkpoint: Checkpoint) -> Response:
    signed = await gateway_of(request).downloads.sign(checkpoint.path)
    return json_response(
        {
            "urls": {name: address_of(request, at) for name, at in signed.addresses.items()},
            "expires": iso(signed.expires),
        }
    )


def described(checkpoint: Checkpoint) -> dict[str, object]:
    path = checkpoint.path
    expires_at = checkpoint.expires_at
    return {
        "checkpoint_id": f"{path.kind}/{path.name}",
        "checkpoint_type": _TYPES[path.kind],
        "time": iso(checkpoint.created_at),
        "tinker_path": str(path),
        "size_bytes": checkpoint.bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": iso(expires_at) if expires_at is not None else None,
    }
