"""Checkpoints: lists, publishing, times to live, deletion, copies and download addresses."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

from pydantic import BaseModel, Field
from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response

from gateway.checkpoints import Checkpoint
from gateway.copies import CopyRequest
from gateway.names import check_ttl, checkpoint_path, parse_checkpoint_path, run_id_of
from gateway.routes.wire import gateway_of, json_response, parse, read_body
from gateway.tables import runs
from tandem.errors import InvalidRequest, UnknownRun, UnknownWeights

_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_LARGEST_PAGE = 10_000


class TinkerPath(BaseModel):
    tinker_path: str


class Ttl(BaseModel):
    """The field must be there: to leave it out would remove a time to live by accident."""

    ttl_seconds: Annotated[int | None, Field()]


class CopyWeights(BaseModel):
    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0)
    destination_project_id: str | None = None
    ttl_seconds: int | None = None


async def run_checkpoints(request: Request) -> Response:
    """Those of one run, oldest first."""
    gateway = gateway_of(request)
    run_id = request.path_params["run_id"]
    if await gateway.database.read_one(select(runs.c.id).where(runs.c.id == run_id)) is None:
        raise UnknownRun(f"there is no training run {run_id!r} on this server")
    found = await gateway.versions.checkpoints.of_run(run_id)
    return json_response({"checkpoints": [_described(c) for c in found]})


async def user_checkpoints(request: Request) -> Response:
    """A page of all that the user has, newest first."""
    gateway = gateway_of(request)
    limit, offset = _page(request)
    found, total = await gateway.versions.checkpoints.of_owner(None, limit=limit, offset=offset)
    return json_response(
        {
            "checkpoints": [_described(c) for c in found],
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
    checkpoint = await _named(request)
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
    return await _signed(request, await gateway_of(request).versions.checkpoints.get(path))


async def weights_info(request: Request) -> Response:
    """What a client has to know to load a checkpoint."""
    gateway = gateway_of(request)
    body = parse(TinkerPath, await read_body(request))
    checkpoint = await gateway.versions.checkpoints.get(body.tinker_path)
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
    parse_checkpoint_path(body.source_path)
    run_id, project_id = None, body.destination_project_id or ""
    if body.session_id is not None:
        if body.model_seq_id is None:
            raise InvalidRequest("copy_weights with a session_id needs a model_seq_id, too")
        await gateway.sessions.require(body.session_id)
        run_id = run_id_of(session_id=body.session_id, model_seq_id=body.model_seq_id)
    elif not project_id:
        raise InvalidRequest(
            "copy_weights needs a destination_project_id, or a session_id and a model_seq_id"
        )
    path = await gateway.copies.copy(
        CopyRequest(
            source=body.source_path,
            owner="local",
            project_id=project_id,
            run_id=run_id,
            ttl_seconds=body.ttl_seconds,
            idempotency_key=request.headers.get("x-idempotency-key", ""),
        )
    )
    return json_response({"tinker_path": path})


def optimizer_config(name: str) -> dict[str, object]:
    """As the SDK has it: Dimuon has a version."""
    return {"type": name, "version": 1} if name == "dimuon" else {"type": name}


def iso(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, tz=dt.UTC).isoformat()


async def _named(request: Request) -> Checkpoint:
    """The checkpoint that the address names. Raises `UnknownWeights` or `InvalidRequest`."""
    given = request.path_params
    path = checkpoint_path(run_id=given["run_id"], kind=given["kind"], name=given["name"])
    found = await gateway_of(request).versions.checkpoints.find(path)
    if found is None:
        raise UnknownWeights(f"there is no checkpoint {path}; it may be deleted or expired")
    return found


async def _set_public(request: Request, *, public: bool) -> Response:
    checkpoint = await _named(request)
    await gateway_of(request).versions.checkpoints.set_public(checkpoint, public=public)
    return Response(status_code=204)


async def _signed(request: Request, checkpoint: Checkpoint) -> Response:
    gateway = gateway_of(request)
    signed = await gateway.downloads.sign(str(checkpoint.path))
    base = (gateway.settings.public_url or str(request.base_url)).rstrip("/")
    return json_response(
        {
            "urls": {name: f"{base}{address}" for name, address in signed.addresses.items()},
            "expires": iso(signed.expires),
        }
    )


def _described(checkpoint: Checkpoint) -> dict[str, object]:
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
