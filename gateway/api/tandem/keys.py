"""Keys, for admins: made, listed, revoked. The keys themselves are shown once, when made."""

from __future__ import annotations

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.wire import (
    gateway_of,
    iso,
    json_response,
    note_for_audit,
    parse,
    read_body,
)
from gateway.auth.keys import LONGEST_LIFE, Key, KeyStore, NewKey, Role


class CreateKey(BaseModel):
    """`expires_in` in seconds; absent: the key does not expire."""

    owner: str = Field(min_length=1, max_length=64)
    role: Role
    name: str = Field("", max_length=100)
    expires_in: float | None = Field(None, gt=0, le=LONGEST_LIFE, allow_inf_nan=False)


async def list_keys(request: Request) -> Response:
    """`{"keys": [{"id", "owner", "role", "name", "state", "created_at", "expires_at",
    "revoked_at", "last_used_at", "local"}]}`; `state` is active, expired or revoked."""
    keys = gateway_of(request).keys
    return json_response({"keys": [described(keys, key) for key in keys.all()]})


async def create_key(request: Request) -> Response:
    """Answers with the key's description and, this once, the `key` itself."""
    keys = gateway_of(request).keys
    body = parse(CreateKey, await read_body(request))
    key, secret = await keys.create(
        NewKey(owner=body.owner, role=body.role, name=body.name, expires_in=body.expires_in)
    )
    note_for_audit(request, target=key.id, owner=key.owner, role=key.role)
    response = json_response({**described(keys, key), "key": secret})
    response.headers["Cache-Control"] = "no-store"
    return response


async def revoke_key(request: Request) -> Response:
    """DELETE keys/ID: the key's description. It and its tokens are refused from now on."""
    keys = gateway_of(request).keys
    key = await keys.revoke(request.path_params["key_id"])
    return json_response(described(keys, key))


def described(keys: KeyStore, key: Key) -> dict[str, object]:
    return {
        "id": key.id,
        "owner": key.owner,
        "role": key.role,
        "name": key.name,
        "state": keys.ended(key) or "active",
        "created_at": iso(key.created_at),
        "expires_at": _iso(key.expires_at),
        "revoked_at": _iso(key.revoked_at),
        "last_used_at": _iso(keys.last_used_at(key)),
        "local": key.local,
    }


def _iso(seconds: float | None) -> str | None:
    return iso(seconds) if seconds is not None else None
