"""Creates, lists and revokes keys, for admins. A key's secret is shown once."""

from __future__ import annotations

from fastapi import Response

from gateway.api.dependencies import AccessDep
from gateway.api.fields import Answer, PathText
from gateway.api.routing import Router
from gateway.api.tandem.key_info import KeyInfo, NewKeyInfo, described
from gateway.owners.auth.keys import NewKey
from tandem.errors import UnknownKey

router = Router("/api/tandem/v1", tag="Tandem")


class KeyList(Answer):
    keys: list[KeyInfo]


@router.operation("GET", "/keys", role="admin")
async def list_keys(access: AccessDep) -> KeyList:
    """List the keys of all owners."""
    keys = access.gateway.keys
    return KeyList(keys=[described(keys, key) for key in keys.all()])


@router.operation(
    "POST",
    "/keys",
    role="admin",
    audit="apikey_create",
    rules=["An owner's name is of letters, digits and `._@+-`."],
)
async def create_key(body: NewKey, access: AccessDep, response: Response) -> NewKeyInfo:
    """Create a key."""
    key, secret = await access.gateway.keys.create(body)
    access.audit.note(key.id, owner=key.owner, role=key.role)
    response.headers["Cache-Control"] = "no-store"
    return NewKeyInfo.of(described(access.gateway.keys, key), key=secret)


@router.operation(
    "DELETE", "/keys/{key_id}", role="admin", audit="apikey_delete", errors=[UnknownKey]
)
async def revoke_key(key_id: PathText, access: AccessDep) -> KeyInfo:
    """Revoke a key. It and its tokens are refused from now on."""
    return described(access.gateway.keys, await access.gateway.keys.revoke(key_id))
