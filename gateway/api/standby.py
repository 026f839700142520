"""Answers requests while this gateway waits for the lease."""

from __future__ import annotations

import asyncio

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.errors import ErrorResponses, json_response
from gateway.api.routing import is_from_this_machine
from tandem.errors import StandingBy

_REASON = "this gateway is a standby, and another one serves; ask again soon"


class StandbyBoundary:
    """Health is the process's. Readiness fails. A `retrieve_future` is held until the gateway
    opens, because after a 5xx the SDK would ask again at once."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        opened: asyncio.Event,
        longest_wait: float,
        registry: CollectorRegistry,
        errors: ErrorResponses,
    ) -> None:
        self._app = app
        self._opened = opened
        self._longest_wait = longest_wait
        self._registry = registry
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = None
        if scope["type"] == "http" and not self._opened.is_set():
            response = await self._answer(scope)
        await (response or self._app)(scope, receive, send)

    async def _answer(self, scope: Scope) -> Response | None:
        match scope["path"]:
            case "/api/v1/healthz":
                return json_response({"status": "ok"})
            case "/metrics" if is_from_this_machine(scope):
                return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
            case "/api/v1/retrieve_future":
                try:
                    await asyncio.wait_for(self._opened.wait(), self._longest_wait)
                except TimeoutError:
                    waiting = {"queue_state": "paused_capacity", "queue_state_reason": _REASON}
                    return json_response({"type": "try_again", **waiting}, status=408)
                return None
        return self._errors.response(StandingBy(_REASON), path=scope["path"])
