"""Manages the keys of a data directory without a running gateway.

`tandem keys` starts it as `python -m gateway.admin.offline_keys`. It answers as the routes in
`api/tandem/keys.py` do. The audit log records changes as the local admin's, without an address."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from typing import Literal

from pydantic import BaseModel

from gateway.admin.request import answer_request
from gateway.api.tandem.key_info import KeyInfo, NewKeyInfo, described
from gateway.owners.auth.audit import AuditLog, Entry
from gateway.owners.auth.identity import urn_of
from gateway.owners.auth.keys import LOCAL_OWNER, KeyStore, NewKey
from gateway.storage.data_directory import locked_data_directory
from gateway.storage.database import Database
from gateway.storage.drivers import is_postgresql
from gateway.storage.leadership import Leadership
from tandem.errors import InvalidRequest
from tandem.settings.gateway import GatewaySettings


class KeysRequest(BaseModel):
    action: Literal["create", "list", "revoke"]
    create: NewKey | None = None
    key_id: str = ""


async def answer(request: KeysRequest, settings: GatewaySettings) -> dict[str, object]:
    """Raise a `TandemError`, for example if a gateway uses the directory or the database."""
    url = settings.database_url
    async with AsyncExitStack() as stack:
        stack.enter_context(locked_data_directory(settings.data_dir))
        epoch = 0
        if is_postgresql(url):
            leadership = await stack.enter_async_context(
                Leadership.open(url=url, timeout=settings.leader_timeout)
            )
            if not await leadership.take_unless_used():
                raise InvalidRequest(
                    "a gateway uses the database; ask that one (it is another data directory's, or "
                    "runs in another container or on another host: run `tandem keys` there)"
                )
            epoch = leadership.epoch
        database = Database(url=url, data_dir=settings.data_dir, epoch=epoch)
        try:
            await database.open()
            keys = KeyStore(database=database)
            await keys.open()
            if request.action == "list":
                return {"keys": [described(keys, key).model_dump() for key in keys.all()]}
            if request.create is not None:
                key, secret = await keys.create(request.create)
                said: KeyInfo = NewKeyInfo.of(described(keys, key), key=secret)
            else:
                said = described(keys, await keys.revoke(request.key_id))
            entry = Entry(
                actor=urn_of(LOCAL_OWNER),
                action="apikey_delete" if request.create is None else "apikey_create",
                target=said.id,
                address="",
                status=200,
                detail={"owner": said.owner, "role": said.role},
            )
            AuditLog(database=database).record(entry)
            return said.model_dump()
        finally:
            await database.close()


def _answer(request: KeysRequest, settings: GatewaySettings) -> dict[str, object]:
    return asyncio.run(answer(request, settings))


if __name__ == "__main__":
    sys.exit(answer_request(KeysRequest, _answer))
