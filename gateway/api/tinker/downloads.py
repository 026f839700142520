"""The files behind signed addresses. No key is needed: the signature is the key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Query
from starlette.requests import Request
from starlette.responses import FileResponse, StreamingResponse

from gateway.api.dependencies import GatewayDep
from gateway.api.fields import PathText
from gateway.api.routing import Router, file_response
from gateway.checkpoints.downloads import PREFIX, Address
from gateway.usage.trace_exports import PREFIX as TRACES
from tandem.errors import AddressExpired, AddressForged, UnknownWeights

router = Router(tag="SDK")

_FILE = file_response("application/octet-stream", "The file, or the part that `Range` asks for")


async def _pinned_file(
    request: Request,
    gateway: GatewayDep,
    run_id: PathText,
    kind: PathText,
    name: PathText,
    file: PathText,
    folder: Annotated[str, Query()] = "",
    expires: Annotated[str, Query()] = "",
    signature: Annotated[str, Query()] = "",
) -> AsyncIterator[Path]:
    """Yield the file, which stays on the disk until the last byte is sent, even when its
    checkpoint is deleted meanwhile."""
    address = Address(run_id, kind, name, file, folder, expires, signature)
    async with gateway.downloads.reading(address, method=request.method) as path:
        yield path


@router.operation(
    "GET",
    PREFIX + "{run_id}/{kind}/{name}/{file}",
    role="signature",
    errors=[AddressForged, AddressExpired, UnknownWeights],
    responses={200: _FILE, 206: _FILE},
)
async def download(file: Annotated[Path, Depends(_pinned_file)]) -> FileResponse:
    """Return a file of a checkpoint, whole, or the part that a Range header asks for."""
    return FileResponse(
        file,
        media_type="application/octet-stream",
        filename=file.name,
        headers={"Cache-Control": "private, no-store", "X-Content-Type-Options": "nosniff"},
    )


@router.operation(
    "GET",
    TRACES + "{file}",
    role="signature",
    errors=[AddressForged, AddressExpired],
    responses={200: file_response("application/json", "A trace, as the Chrome trace viewer reads")},
)
async def trace_file(
    gateway: GatewayDep,
    file: PathText,
    expires: Annotated[str, Query()] = "",
    signature: Annotated[str, Query()] = "",
) -> StreamingResponse:
    """Return a session's trace, generated as it is sent."""
    content = gateway.traces.generate(file=file, expires=expires, signature=signature)
    return StreamingResponse(
        content,
        media_type="application/json",
        headers={"Content-Disposition": f'attachment; filename="{file}"'},
    )
