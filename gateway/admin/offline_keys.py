"""Manages the keys of a data directory without a running gateway.

`tandem keys` starts it as `python -m gateway.admin.offline_keys`. It reads a JSON request from
standard input, so that no argument shows a secret, and writes the answer of the routes in
`api/tandem/keys.py`, or `{"error"}` with exit status 1. The audit log records changes as the local
admin's, without an address."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from typing import Literal

import orjson
from pydantic import BaseModel, ValidationError

from gateway.api.tandem.key_info import KeyInfo, NewKeyInfo, described
from gateway.owners.auth.audit import AuditLog, Entry
from gateway.owners.auth.identity import urn_of
from gateway.owners.auth.keys import LOCAL_OWNER, KeyStore, NewKey
from gateway.storage.data_directory import locked_data_directory
from gateway.storage.database import Database
from gateway.storage.drivers import is_postgresql
from gateway.storage.lease import GatewayLease
from tandem.errors import InvalidRequest, TandemError
from tandem.settings.gateway import GatewaySettings
from tandem.telemetry import configure_logging


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
            lease = await stack.enter_async_context(
                GatewayLease.open(url=url, ttl=settings.lease_ttl)
            )
            if not await lease.take_unless_used():
                raise InvalidRequest(
                    "a gateway uses the database; ask that one (it is another data directory's, or "
                    "runs in another container or on another host: run `tandem keys` there)"
                )
            epoch = lease.epoch
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


def main() -> int:
    configure_logging(service="gateway", level="warning")
    os.umask(0o077)  # as in the gateway: this may be the first process to create these files
    settings = GatewaySettings()
    settings = settings.model_copy(update={"data_dir": settings.data_dir.resolve()})
    try:
        request = KeysRequest.model_validate_json(sys.stdin.buffer.read())
        said = asyncio.run(answer(request, settings))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        said = {"error": f"{first['loc'][-1] if first['loc'] else 'request'}: {first['msg']}"}
    except TandemError as error:
        said = {"error": error.message}
    sys.stdout.buffer.write(orjson.dumps(said))
    return 1 if "error" in said else 0


if __name__ == "__main__":
    sys.exit(main())
