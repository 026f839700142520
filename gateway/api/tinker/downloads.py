"""The files behind signed addresses. No key is asked for: the signature is the key."""

from __future__ import annotations

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from gateway.api.wire import gateway_of, parse_query
from gateway.checkpoints.catalog import CheckpointCatalog
from gateway.checkpoints.downloads import Address, DownloadSigner
from gateway.identifiers import CheckpointPath


class DownloadQuery(BaseModel):
    folder: str = ""
    expires: str = ""
    signature: str = ""


async def download(request: Request) -> Response:
    """A file of a checkpoint, whole, or the part that a Range header asks for."""
    gateway = gateway_of(request)
    given, query = request.path_params, parse_query(DownloadQuery, request)
    address = Address(
        run_id=given["run_id"],
        kind=given["kind"],
        name=given["name"],
        file=given["file"],
        folder=query.folder,
        expires=query.expires,
        signature=query.signature,
    )
    path = gateway.downloads.check(address, method=request.method)
    return _HeldFile(
        address, path=path, downloads=gateway.downloads, checkpoints=gateway.checkpoints
    )


class _HeldFile(Response):
    """Streams the file, which stays on the disk until the last byte is sent, even when its
    checkpoint is deleted meanwhile."""

    def __init__(
        self,
        address: Address,
        *,
        path: CheckpointPath,
        downloads: DownloadSigner,
        checkpoints: CheckpointCatalog,
    ) -> None:
        self._address = address
        self._path = path
        self._downloads = downloads
        self._checkpoints = checkpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._checkpoints.reading_unchecked(self._path) as checkpoint:
            file = await self._downloads.find(self._address, checkpoint)
            response = FileResponse(
                file,
                media_type="application/octet-stream",
                filename=file.name,
                headers={"Cache-Control": "private, no-store", "X-Content-Type-Options": "nosniff"},
            )
            await response(scope, receive, send)
