"""Checkpoints: lists, publishing, expiry, deletion, copies and download addresses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Literal

from fastapi import Depends, Header, Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import FileResponse, StreamingResponse

from gateway.api.dependencies import (
    CHECKPOINT,
    Access,
    AccessDep,
    OwnCheckpoint,
    ReadableCheckpoint,
)
from gateway.api.fields import Answer, Omitted, PathText, Time, UserMetadata
from gateway.api.routing import Router, file_response
from gateway.checkpoints.catalog import Checkpoint
from gateway.checkpoints.copies import CopyRequest
from gateway.checkpoints.downloads import PREFIX, Address
from gateway.identifiers import check_ttl, run_id_of
from tandem.errors import (
    AddressExpired,
    AddressForged,
    CheckpointDamaged,
    InvalidRequest,
    SessionFinished,
    StorageFailed,
    StorageFull,
    UnknownRun,
    UnknownSession,
    UnknownWeights,
)
from tandem.settings.chosen_names import Label

_TYPES: dict[str, Literal["training", "sampler", "external"]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_LARGEST_PAGE = 1000
"""The page size of the `tinker` command. A page is built in memory."""
_ONE = "/training_runs/{run_id}/checkpoints/{kind}/{name}"

router = Router("/api/v1", tag="SDK")
own_router = Router("/api/tandem/v1", tag="Tandem")
files_router = Router(tag="SDK")

_FILE = file_response("application/octet-stream", "The file, or the part that `Range` asks for")


class TinkerPath(BaseModel):
    tinker_path: str


class Ttl(BaseModel):
    """No default: a missing field would remove the expiry by accident."""

    ttl_seconds: int | None


class CopyWeights(BaseModel):
    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0, lt=10**18)
    destination_project_id: Annotated[Label, Field(max_length=200)] | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class CheckpointInfo(Answer):
    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: Time
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: UserMetadata
    expires_at: Time | None


class PageCursor(Answer):
    offset: int
    limit: int
    total_count: int


class CheckpointPage(Answer):
    checkpoints: list[CheckpointInfo]
    cursor: PageCursor


class RunCheckpoints(Answer):
    checkpoints: list[CheckpointInfo]


class SignedUrls(Answer):
    """Addresses by file name. They need no key until they expire."""

    urls: dict[str, str]
    expires: Time


class OptimizerName(Answer):
    """The SDK's form: only Dimuon has a version."""

    type: Literal["adamw", "dimuon"]
    version: int | None = None


class WeightsInfo(Answer):
    """The last four fields are present only for an adapter's checkpoint."""

    base_model: str
    is_lora: bool
    optimizer_config: OptimizerName
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


class Copied(Answer):
    tinker_path: str


@router.operation(
    "GET",
    "/training_runs/{run_id}/checkpoints",
    role="reader",
    errors=[UnknownRun],
    responses={200: {"model": RunCheckpoints}},
)
async def run_checkpoints(run_id: PathText, access: AccessDep) -> StreamingResponse:
    """Return all checkpoints of one run, oldest first. The SDK asks for no pages, so the answer is
    streamed."""
    run = await access.gateway.run_records.run(run_id, access.caller, scope="accessible")
    return StreamingResponse(_of_run(run.id, access), media_type="application/json")


async def _of_run(run_id: str, access: Access) -> AsyncIterator[bytes]:
    separator = b'{"checkpoints":['
    async for found in access.gateway.checkpoints.of_run(run_id):
        for checkpoint in found:
            if checkpoint.public or access.caller.may_see(checkpoint.owner):
                yield separator + described(checkpoint).model_dump_json().encode()
                separator = b","
    yield b"]}" if separator == b"," else separator + b"]}"


@router.operation("GET", "/checkpoints", role="reader")
async def user_checkpoints(
    access: AccessDep,
    limit: Annotated[int, Query(ge=0, lt=10**12)] = 100,
    offset: Annotated[int, Query(ge=0, lt=10**12)] = 0,
) -> CheckpointPage:
    """Return a page of the caller's checkpoints, newest first, at most 1000."""
    limit = min(limit, _LARGEST_PAGE)
    found, total = await access.gateway.checkpoints.of_owner(
        access.caller.owner, limit=limit, offset=offset
    )
    return CheckpointPage(
        checkpoints=[described(c) for c in found],
        cursor=PageCursor(offset=offset, limit=limit, total_count=total),
    )


@router.operation("DELETE", _ONE, role="member", audit="checkpoint_delete")
async def delete_checkpoint(checkpoint: OwnCheckpoint, access: AccessDep) -> None:
    """Delete a checkpoint and its files."""
    await access.gateway.checkpoints.delete(checkpoint)


@router.operation("POST", f"{_ONE}/publish", role="member", audit="checkpoint_publish")
async def publish_checkpoint(checkpoint: OwnCheckpoint, access: AccessDep) -> None:
    """Let every key holder read the checkpoint. Idempotent."""
    await access.gateway.checkpoints.change(checkpoint, public=True)


@router.operation("DELETE", f"{_ONE}/publish", role="member", audit="checkpoint_unpublish")
async def unpublish_checkpoint(checkpoint: OwnCheckpoint, access: AccessDep) -> None:
    """Make a published checkpoint private again."""
    await access.gateway.checkpoints.change(checkpoint, public=False)


@router.operation(
    "PUT",
    f"{_ONE}/ttl",
    role="member",
    audit="checkpoint_ttl_set",
    rules=["From an hour to ten years."],
)
async def set_checkpoint_ttl(body: Ttl, checkpoint: OwnCheckpoint, access: AccessDep) -> None:
    """Set a checkpoint's expiry in seconds from now; null: never."""
    check_ttl(body.ttl_seconds)
    await access.gateway.checkpoints.set_ttl(checkpoint, body.ttl_seconds)


@router.operation(
    "GET",
    f"{_ONE}/external_weights_urls",
    role="reader",
    rules=["The checkpoint must be one that was exported."],
)
async def external_weights_urls(checkpoint: ReadableCheckpoint, access: AccessDep) -> SignedUrls:
    """Return signed addresses of an export's files. They need no key for an hour."""
    if checkpoint.path.kind != "external_weights":
        raise InvalidRequest(
            f"{checkpoint.path} is not for download; export the weights with "
            "save_weights_external (`tinker checkpoint download` does that for a training "
            "checkpoint)"
        )
    return await _signed(access, checkpoint)


@own_router.operation("GET", "/checkpoints/files", role="reader")
async def checkpoint_files(
    path: Annotated[str, Query(), CHECKPOINT], access: AccessDep
) -> SignedUrls:
    """Return signed addresses of any checkpoint's files (`?path=tinker://…`)."""
    return await _signed(access, await access.checkpoint(path))


@router.operation("POST", "/weights_info", role="reader", audit=None)
async def weights_info(body: Annotated[TinkerPath, CHECKPOINT], access: AccessDep) -> WeightsInfo:
    """Return the information needed to load a checkpoint."""
    checkpoint = await access.checkpoint(body.tinker_path)
    training = (await access.gateway.checkpoints.origin(checkpoint.path.run_id)).training
    info = WeightsInfo(
        base_model=checkpoint.base_model,
        is_lora=training.lora is not None,
        optimizer_config=optimizer_name(training.optimizer),
    )
    if (lora := training.lora) is not None:
        info.lora_rank = lora.rank
        info.train_unembed = lora.unembedding
        info.train_mlp = lora.mlp
        info.train_attn = lora.attention
    return info


@router.operation(
    "POST",
    "/copy_weights",
    role="member",
    audit="checkpoint_copy",
    errors=[
        UnknownWeights,
        UnknownSession,
        SessionFinished,
        StorageFailed,
        StorageFull,
        CheckpointDamaged,
    ],
    rules=[
        "A copy needs a `destination_project_id`, or a `session_id` with a `model_seq_id`.",
        "The path must be one, and the time to live from an hour to ten years.",
    ],
)
async def copy_weights(
    body: CopyWeights,
    access: AccessDep,
    x_tinker_weights_access_token: Annotated[
        str | Omitted, Header(description="Another key, which may read the source")
    ] = None,
    x_idempotency_key: Annotated[
        str, Header(description="The same key again returns the first copy")
    ] = "",
) -> Copied:
    """Copy a checkpoint into a project or a session. Answers after the copy."""
    check_ttl(body.ttl_seconds)
    token = x_tinker_weights_access_token or body.weights_access_token
    readers = access.readers(token=token)
    await access.gateway.checkpoints.get(body.source_path, readers=readers)
    owner, run_id, project_id = access.caller.owner, None, body.destination_project_id or ""
    if body.session_id is not None:
        if body.model_seq_id is None:
            raise InvalidRequest("copy_weights with a session_id needs a model_seq_id, too")
        # A copy in a session belongs to the session's project and owner.
        session = await access.session(body.session_id)
        owner, project_id = session.owner, session.project_id
        run_id = run_id_of(session_id=body.session_id, model_seq_id=body.model_seq_id)
    elif not project_id:
        raise InvalidRequest(
            "copy_weights needs a destination_project_id, or a session_id and a model_seq_id"
        )
    path = await access.gateway.copies.copy(
        CopyRequest(
            source=body.source_path,
            readers=readers,
            owner=owner,
            project_id=project_id,
            run_id=run_id,
            ttl_seconds=body.ttl_seconds,
            idempotency_key=x_idempotency_key,
        )
    )
    access.audit.note(path, source=body.source_path)
    return Copied(tinker_path=path)


async def _pinned_file(
    request: Request,
    access: AccessDep,
    run_id: PathText,
    kind: PathText,
    name: PathText,
    file: PathText,
    folder: Annotated[str, Query()] = "",
    expires: Annotated[str, Query()] = "",
    signature: Annotated[str, Query()] = "",
) -> AsyncIterator[Path]:
    """Yield the file and pin it until the last byte is sent, even if its checkpoint is deleted."""
    address = Address(run_id, kind, name, file, folder, expires, signature)
    async with access.gateway.downloads.reading(address, method=request.method) as path:
        yield path


@files_router.operation(
    "GET",
    PREFIX + "{run_id}/{kind}/{name}/{file}",
    role="signature",
    errors=[AddressForged, AddressExpired, UnknownWeights],
    responses={200: _FILE, 206: _FILE},
)
async def download(file: Annotated[Path, Depends(_pinned_file)]) -> FileResponse:
    """Return a checkpoint's file, or the part in a Range header."""
    return FileResponse(
        file,
        media_type="application/octet-stream",
        filename=file.name,
        headers={"Cache-Control": "private, no-store", "X-Content-Type-Options": "nosniff"},
    )


def optimizer_name(name: Literal["adamw", "dimuon"]) -> OptimizerName:
    return OptimizerName(type=name, version=1) if name == "dimuon" else OptimizerName(type=name)


async def _signed(access: Access, checkpoint: Checkpoint) -> SignedUrls:
    addresses, expires = await access.gateway.downloads.sign(checkpoint.path)
    urls = {name: f"{access.base_url}{address}" for name, address in addresses.items()}
    return SignedUrls(urls=urls, expires=expires)


def described(checkpoint: Checkpoint) -> CheckpointInfo:
    path = checkpoint.path
    return CheckpointInfo.of(
        checkpoint,
        checkpoint_id=f"{path.kind}/{path.name}",
        checkpoint_type=_TYPES[path.kind],
        time=checkpoint.created_at,
        tinker_path=str(path),
        size_bytes=checkpoint.bytes,
    )
