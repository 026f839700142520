"""What a request may hold while it is answered: a place, memory for its body, pieces of answer.

Pure ASGI, inside `Edge`, which says who asks.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.wire import error_response
from gateway.limits.quotas import Quotas
from tandem.errors import Overloaded

_PIECE = 256 * 2**10
"""Bytes of an answer that are handed over at once: what the connection holds for a client that
reads slowly."""


class RequestReservations:
    """Counts the open requests of each owner, and gives back what their bodies took."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limits: Quotas = scope["app"].state.gateway.limits
        state = scope.setdefault("state", {})
        caller = state.get("caller")
        owner = caller.owner if caller is not None else ""
        try:
            place = limits.requests.take(owner)
        except Overloaded as error:
            await error_response(error, path=scope["path"])(scope, receive, send)
            return
        body = state["body_lease"] = limits.bodies.empty_lease(owner)

        async def send_in_pieces(message: Message) -> None:
            whole: bytes = message.get("body", b"")
            if len(whole) <= _PIECE:
                await send(message)
                return
            for start in range(0, len(whole), _PIECE):
                end = start + _PIECE
                more = message.get("more_body", False) or end < len(whole)
                await send({**message, "body": whole[start:end], "more_body": more})

        try:
            await self._app(scope, receive, send_in_pieces)
        finally:
            body.give_back()
            place.give_back()
