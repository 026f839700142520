"""Tokens for keys, and what a key may know of itself."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway.api.wire import caller_of, gateway_of, json_response, note_for_audit
from gateway.auth.identity import ORGANIZATION
from tandem.errors import PermissionDenied, Unauthenticated


async def exchange_token(request: Request) -> Response:
    """A JWT for the key, which the SDK presents from then on, and reads `whoami` from."""
    return json_response({"jwt": gateway_of(request).identity.issue(caller_of(request))})


async def own_key(request: Request) -> Response:
    """`tinker auth login` asks this of a key before it stores it. There are no email addresses
    here: the owner's name stands in their place."""
    caller = caller_of(request)
    key = gateway_of(request).keys.get(caller.key_id)
    if key is None:  # it was replaced since the request came in
        raise Unauthenticated("the API key is no longer good")
    return json_response(
        {
            "key_id": key.number,
            "name": key.name or f"{key.owner}-{key.id}",
            "note": f"role {key.role}",
            "details": {
                "org_details": {"name": ORGANIZATION},
                "user_details": {"email": caller.owner},
            },
        }
    )


async def delete_own_key(request: Request) -> Response:
    """Revokes the key that the caller presents, or that its token stands for: 204. From then
    on it is refused. The local key stays: the commands on this machine work with it."""
    gateway, caller = gateway_of(request), caller_of(request)
    note_for_audit(request, target=caller.key_id)
    key = gateway.keys.get(caller.key_id)
    if key is not None and key.local:
        raise PermissionDenied(
            "this is the local key of the gateway, so it cannot be deleted here; to replace it, "
            "stop the gateway, remove the file api_key in its data directory (or change "
            "TANDEM_API_KEY) and start it again"
        )
    await gateway.keys.revoke(caller.key_id)
    return Response(status_code=204)
