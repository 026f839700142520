"""Checkpoints: lists, publishing, times to live, deletion, copies and download addresses."""

from __future__ import annotations

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.checkpoints import Checkpoint
from gateway.copies import CopyRequest
from gateway.identity import Caller
from gateway.names import check_ttl, checkpoint_path, run_id_of
from gateway.routes.wire import (
    address_of,
    caller_of,
    gateway_of,
    iso,
    json_response,
    note_for_audit,
    parse,
    read_body,
)
from tandem.errors import InvalidRequest, UnknownWeights

_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_LARGEST_PAGE = 10_000


class TinkerPath(BaseModel):
    tinker_path: str


class Ttl(BaseModel):
    """Without a default: to leave the field out would remove a time to live by accident."""

    ttl_seconds: int | None


class CopyWeights(BaseModel):
    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0)
    destination_project_id: str | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


async def run_checkpoints(request: Request) -> Response:
    """Those of one run, oldest first."""
    gateway, caller = gateway_of(request), caller_of(request)
    run = await gateway.directory.run(request.path_params["run_id"], caller, scope="accessible")
    found = await gateway.versions.checkpoints.of_run(run.id)
    return json_response(
        {"checkpoints": [described(c) for c in found if c.public or _owns(caller, c)]}
    )


async def user_checkpoints(request: Request) -> Response:
    """A page of all that the user has, newest first."""
    gateway = gateway_of(request)
    limit, offset = _page(request)
    found, total = await gateway.versions.checkpoints.of_owner(
        caller_of(request).owner, limit=limit, offset=offset
    )
    return json_response(
        {
            "checkpoints": [described(c) for c in found],
            "cursor": {"offset": offset, "limit": limit, "total_count": total},
        }
    )


async def delete_checkpoint(request: Request) -> Response:
    checkpoint = await _named(request)
    await gateway_of(request).versions.checkpoints.delete(checkpoint)
    return Response(status_code=204)


async def publish_checkpoint(request: Request) -> Response:
    """Also when it is published already: nothing is wrong then."""
    return await _set_public(request, public=True)


async def unpublish_checkpoint(request: Request) -> Response:
    return await _set_public(request, public=False)


async def set_checkpoint_ttl(request: Request) -> Response:
    """Counted from now; null: it does not expire any more."""
    body = parse(Ttl, await read_body(request))
    check_ttl(body.ttl_seconds)
    checkpoint = await _named(request)
    await gateway_of(request).versions.checkpoints.set_ttl(checkpoint, body.ttl_seconds)
    return Response(status_code=204)


async def external_weights_urls(request: Request) -> Response:
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
    path = request.query_params.get("path", "")
    checkpoint = await gateway_of(request).versions.checkpoints.get(path)
    check_readable(request, checkpoint)
    return await _signed(request, checkpoint)


async def weights_info(request: Request) -> Response:
    """What a client has to know to load a checkpoint."""
    gateway = gateway_of(request)
    body = parse(TinkerPath, await read_body(request))
    checkpoint = await gateway.versions.checkpoints.get(body.tinker_path)
    check_readable(request, checkpoint)
    training = (await gateway.versions.checkpoints.origin(checkpoint.path.run_id)).training
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
    gateway = gateway_of(request)
    body = parse(CopyWeights, await read_body(request))
    check_ttl(body.ttl_seconds)
    token = request.headers.get("x-tinker-weights-access-token") or body.weights_access_token
    source = await gateway.versions.checkpoints.get(body.source_path)
    check_readable(request, source, token=token)
    run_id, project_id = None, body.destination_project_id or ""
    if body.session_id is not None:
        if body.model_seq_id is None:
            raise InvalidRequest("copy_weights with a session_id needs a model_seq_id, too")
        # A copy in a session is of the session's project.
        project_id = (await gateway.sessions.require(body.session_id)).project_id
        run_id = run_id_of(session_id=body.session_id, model_seq_id=body.model_seq_id)
    elif not project_id:
        raise InvalidRequest(
            "copy_weights needs a destination_project_id, or a session_id and a model_seq_id"
        )
    path = await gateway.copies.copy(
        CopyRequest(
            source=body.source_path,
            owner=caller_of(request).owner,
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


def check_readable(request: Request, checkpoint: Checkpoint, *, token: str | None = None) -> None:
    """Raises `UnknownWeights` for what the caller may not read: neither its own nor public, nor
    of the owner whose key or token is in `token`."""
    callers = [caller_of(request)]
    if token:
        callers.append(gateway_of(request).identity.identify(token.encode()))
    if not checkpoint.public and not any(_owns(c, checkpoint) for c in callers):
        raise _unknown(str(checkpoint.path))


async def _named(request: Request, *, change: bool = True) -> Checkpoint:
    """The checkpoint that the address names, and that the caller may read, or `change`. Raises
    `UnknownWeights` or `InvalidRequest`."""
    given = request.path_params
    path = checkpoint_path(run_id=given["run_id"], kind=given["kind"], name=given["name"])
    found = await gateway_of(request).versions.checkpoints.find(path)
    if found is None or (change and not _owns(caller_of(request), found)):
        raise _unknown(str(path))
    if not change:
        check_readable(request, found)
    return found


def _owns(caller: Caller, checkpoint: Checkpoint) -> bool:
    return caller.role == "admin" or caller.owner == checkpoint.owner


def _unknown(path: str) -> UnknownWeights:
    return UnknownWeights(f"there is no checkpoint {path!r}; it may be deleted or expired")


async def _set_public(request: Request, *, public: bool) -> Response:
    checkpoint = await _named(request)
    await gateway_of(request).versions.checkpoints.set_public(checkpoint, public=public)
    return Response(status_code=204)


async def _signed(request: Request, checkpoint: Checkpoint) -> Response:
    signed = await gateway_of(request).downloads.sign(str(checkpoint.path))
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


def _page(request: Request) -> tuple[int, int]:
    """Raises `InvalidRequest` for what are no numbers."""
    found = []
    for name, default in (("limit", 100), ("offset", 0)):
        text = request.query_params.get(name, str(default))
        if not text.isascii() or not text.isdigit() or len(text) > 12:
            raise InvalidRequest(f"{name} is {text[:40]!r}; it must be a number, not negative")
        found.append(int(text))
    return min(found[0], _LARGEST_PAGE), found[1]
