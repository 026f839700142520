"""Download addresses: who has one needs no key, until it expires.

An address names run, kind, name, file, expiry and the folder that the name stood for, and
carries an HMAC over all of these and the method, so that none can be altered, and so that an
address does not lead to something newer of the same name. What is not signed is refused before
anything is looked up.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

from gateway.auth.signing import is_signed, sign
from gateway.checkpoints.catalog import Checkpoint
from gateway.checkpoints.exports import files_of
from gateway.checkpoints.versions import VersionStore
from gateway.identifiers import checkpoint_path
from tandem.errors import AddressExpired, AddressForged, UnknownWeights

PREFIX = "/api/v1/downloads/"
LIFETIME = 3600
"""Seconds. The `tinker` command asks for new ones when five minutes are left."""

_PURPOSE = "download"
_METHOD = "GET"


@dataclass(frozen=True)
class Address:
    """What a client asks to download. `expires` in seconds since 1970, as it was written."""

    run_id: str
    kind: str
    name: str
    file: str
    place: str
    expires: str
    signature: str


@dataclass(frozen=True)
class SignedFiles:
    """Addresses relative to the server, by file name."""

    addresses: dict[str, str]
    expires: int


class DownloadSigner:
    def __init__(self, *, key: bytes, versions: VersionStore) -> None:
        self._key = key
        self._versions = versions

    async def sign(self, path: str) -> SignedFiles:
        """An address for each file of a checkpoint. Raises `UnknownWeights`."""
        async with self._versions.checkpoints.reading(path) as checkpoint:
            files = await self._files(checkpoint)
        expires = int(time.time()) + LIFETIME
        return SignedFiles(
            addresses={name: self._address(checkpoint, name, expires) for name in files},
            expires=expires,
        )

    def check(self, address: Address, *, method: str) -> str:
        """The checkpoint's path. Raises `AddressForged`, or `AddressExpired` for one that was
        good."""
        a = address
        parts = (method, a.run_id, a.kind, a.name, a.place, a.file, a.expires)
        if not is_signed(self._key, a.signature, _PURPOSE, *parts):
            raise AddressForged(
                "this download address was not signed here, or was altered; ask for a new one "
                "with get_external_weights_urls"
            )
        if time.time() >= int(a.expires):
            raise AddressExpired(
                "this download address has expired; ask for a new one with "
                "get_external_weights_urls"
            )
        return str(checkpoint_path(run_id=a.run_id, kind=a.kind, name=a.name))

    async def find(self, address: Address, checkpoint: Checkpoint) -> Path:
        """The file itself, of a checkpoint that is being read. Raises `UnknownWeights`."""
        file = (await self._files(checkpoint)).get(address.file)
        if file is None or checkpoint.place != address.place:
            raise UnknownWeights(f"{checkpoint.path} no longer has the file {address.file!r}")
        return file

    async def _files(self, checkpoint: Checkpoint) -> dict[str, Path]:
        folder = await self._versions.folder_of(checkpoint)
        return await asyncio.to_thread(files_of, checkpoint, folder)

    def _address(self, checkpoint: Checkpoint, file: str, expires: int) -> str:
        path, place = checkpoint.path, checkpoint.place
        parts = (_METHOD, path.run_id, path.kind, path.name, place, file, str(expires))
        signature = sign(self._key, _PURPOSE, *parts)
        where = "/".join(quote(p, safe=":") for p in (path.run_id, path.kind, path.name, file))
        query = urlencode({"place": place, "expires": expires, "signature": signature}, safe="/")
        return f"{PREFIX}{where}?{query}"
