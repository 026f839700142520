"""Signed download addresses, which work without a key until they expire.

The signature covers the method, run, kind, name, file, expiry and folder, so an address never leads
to a newer checkpoint with this name. It is checked before any lookup."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

from gateway.checkpoints.catalog import Checkpoint, CheckpointCatalog
from gateway.checkpoints.versions import VersionStore
from gateway.identifiers import CheckpointPath, make_checkpoint_path
from gateway.owners.auth.signing import check_address, sign_address
from tandem.errors import UnknownWeights

PREFIX = "/api/v1/downloads/"
LIFETIME = 3600
"""Seconds. The `tinker` command renews addresses with five minutes left."""

_PURPOSE = "download"


@dataclass(frozen=True)
class Address:
    """`folder` is relative to the data directory. `expires` is text, in seconds since 1970."""

    run_id: str
    kind: str
    name: str
    file: str
    folder: str
    expires: str
    signature: str


@dataclass(eq=False, repr=False, kw_only=True)
class DownloadSigner:
    key: bytes
    checkpoints: CheckpointCatalog
    versions: VersionStore

    async def sign(self, path: CheckpointPath) -> tuple[dict[str, str], int]:
        """Return each file's address, relative to the server, by file name, and the expiry in
        seconds since 1970. Raises `UnknownWeights`."""
        async with self.checkpoints.reading(str(path), readers=None) as checkpoint:
            files = await self.versions.files(checkpoint)
        expires = int(time.time()) + LIFETIME
        return {name: self._address(checkpoint, name, expires) for name in files}, expires

    @asynccontextmanager
    async def reading(self, address: Address, *, method: str) -> AsyncIterator[Path]:
        """Return the file and keep it for the block, even if its checkpoint is deleted. Raises
        `AddressForged`, `AddressExpired` or `UnknownWeights`."""
        check_address(
            self.key,
            _PURPOSE,
            method,
            address.run_id,
            address.kind,
            address.name,
            address.folder,
            address.file,
            expires=address.expires,
            signature=address.signature,
            what="this download address",
            renew="ask for a new one with get_external_weights_urls",
        )
        path = make_checkpoint_path(run_id=address.run_id, kind=address.kind, name=address.name)
        async with self.checkpoints.reading(str(path), readers=None) as checkpoint:
            file = (await self.versions.files(checkpoint)).get(address.file)
            if file is None or checkpoint.relative_folder != address.folder:
                raise UnknownWeights(f"{path} no longer has the file {address.file!r}")
            yield file

    def _address(self, checkpoint: Checkpoint, file: str, expires: int) -> str:
        path, folder = checkpoint.path, checkpoint.relative_folder
        parts = (path.run_id, path.kind, path.name)
        where = "/".join(quote(part, safe=":") for part in (*parts, file))
        query = sign_address(self.key, _PURPOSE, "GET", *parts, folder, file, expires=expires)
        return f"{PREFIX}{where}?{urlencode({'folder': folder, **query}, safe='/')}"
