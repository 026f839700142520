"""Manages the keys of a data directory without a running gateway.

`tandem keys` starts it as `python -m gateway.admin.offline_keys`. It answers as the routes in
`api/tandem/keys.py` do. The audit log records changes as the local admin's, without an address."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel

from gateway.admin.request import answer_request
from gateway.admin.unused_database import unused_database
from gateway.api.tandem.key_info import KeyInfo, NewKeyInfo, described
from gateway.owners.auth.audit import AuditLog, Entry
from gateway.owners.auth.keys import KeyStore, NewKey
from gateway.storage.data_directory import locked_data_directory
from tandem.settings.gateway import GatewaySettings


class KeysRequest(BaseModel):
    action: Literal["create", "list", "revoke"]
    create: NewKey | None = None
    key_id: str = ""


async def answer(request: KeysRequest, settings: GatewaySettings) -> dict[str, object]:
    """Raise a `TandemError`, for example if a gateway uses the directory or the database."""
    with locked_data_directory(settings.data_dir):
        async with unused_database(settings) as database:
            keys = KeyStore(database=database)
            await keys.open()
            if request.action == "list":
                return {"keys": [described(keys, key).model_dump() for key in keys.all()]}
            if request.create is not None:
                key, secret = await keys.create(request.create)
                said: KeyInfo = NewKeyInfo.of(described(keys, key), key=secret)
            else:
                said = described(keys, await keys.revoke(request.key_id))
            action = "apikey_delete" if request.create is None else "apikey_create"
            entry = Entry.of_local(action, said.id, owner=said.owner, role=said.role)
            AuditLog(database=database).record(entry)
            return said.model_dump()


def _answer(request: KeysRequest, settings: GatewaySettings) -> dict[str, object]:
    return asyncio.run(answer(request, settings))


if __name__ == "__main__":
    sys.exit(answer_request(KeysRequest, _answer))
