"""Tokens for keys, and what a key may know of itself."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway.identity import ORGANIZATION
from gateway.routes.wire import caller_of, gateway_of, json_response
from tandem.errors import PermissionDenied


async def exchange_token(request: Request) -> Response:
    """A JWT for the key, which the SDK presents from then on, and reads `whoami` from."""
    return json_response({"jwt": gateway_of(request).identity.issue(caller_of(request))})


async def own_key(request: Request) -> Response:
    """`tinker auth login` asks this of a key before it stores it. There are no email addresses
    here: the owner's name stands in their place."""
    caller = caller_of(request)
    return json_response(
        {
            "key_id": caller.key_id,
            "name": f"{caller.owner}-key",
            "note": "the key of this gateway's data directory",
            "details": {
                "org_details": {"name": ORGANIZATION},
                "user_details": {"email": caller.owner},
            },
        }
    )


async def delete_own_key(_request: Request) -> Response:
    """Refused: it is the gateway's only key, and nobody could ask for anything any more."""
    raise PermissionDenied(
        "this is the only key of the gateway, so it cannot be deleted here; to replace it, stop "
        "the gateway, remove the file api_key in its data directory (or change TANDEM_API_KEY) "
        "and start it again"
    )
