"""Tokens for keys, and what a key may know of itself."""

from __future__ import annotations

from gateway.api.dependencies import AuditDep, CallerDep, GatewayDep
from gateway.api.fields import Answer, AuthRefusal
from gateway.api.routing import Router
from gateway.auth.identity import ORGANIZATION
from tandem.errors import PermissionDenied, Unauthenticated

router = Router("/api/v1/auth", tag="SDK", refusal=AuthRefusal)


class Token(Answer):
    jwt: str


class OwnKey(Answer):
    key_id: int
    name: str
    note: str
    details: dict[str, dict[str, str]]


@router.operation("POST", "/token", role="reader", audit=None)
async def exchange_token(gateway: GatewayDep, caller: CallerDep) -> Token:
    """Exchange the key for a JWT, which the SDK presents from then on."""
    return Token(jwt=gateway.identity.issue(caller))


@router.operation("GET", "/apikey/me", role="reader")
async def own_key(gateway: GatewayDep, caller: CallerDep) -> OwnKey:
    """Describe the key: `tinker auth login` asks before it stores one. There are no email
    addresses here: the owner's name stands in their place."""
    key = gateway.keys.get(caller.key_id)
    if key is None:  # it was replaced since the request came in
        raise Unauthenticated("the API key is no longer valid")
    return OwnKey(
        key_id=key.number,
        name=key.name or f"{key.owner}-{key.id}",
        note=f"role {key.role}",
        details={"org_details": {"name": ORGANIZATION}, "user_details": {"email": caller.owner}},
    )


@router.operation(
    "DELETE",
    "/apikey/me",
    role="reader",  # whoever holds a key may give it up
    audit="apikey_delete",
    errors=[PermissionDenied],
)
async def delete_own_key(gateway: GatewayDep, caller: CallerDep, audit: AuditDep) -> None:
    """Revoke the key that the caller presents, or that its token stands for. The local key
    stays: the commands on this machine work with it."""
    audit.note(caller.key_id)
    key = gateway.keys.get(caller.key_id)
    if key is not None and key.local:
        raise PermissionDenied(
            "this is the local key of the gateway, so it cannot be deleted here; to replace it, "
            "stop the gateway, remove the file api_key in its data directory (or change "
            "TANDEM_API_KEY) and start it again"
        )
    await gateway.keys.revoke(caller.key_id)
