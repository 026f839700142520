"""What surrounds every request: the key, the clock, and the last word on errors.

Pure ASGI, since this is on the way of every request.
"""

from __future__ import annotations

import hmac
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.core import Gateway
from gateway.downloads import PREFIX as DOWNLOADS
from gateway.routes.wire import error_response
from tandem.errors import InternalError, Unauthenticated
from tandem.telemetry import get_log

_OPEN_PATHS = frozenset({"/api/v1/healthz", "/metrics"})


class Edge:
    """Refuses what has no valid key (X-API-Key), counts and times the rest."""

    def __init__(self, app: ASGIApp, *, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway
        self._log = get_log()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if not _is_open(scope["path"]) and not self._has_key(scope):
                refusal = Unauthenticated(
                    "the API key is missing or wrong; `tandem up` prints the right one "
                    "(TINKER_API_KEY)"
                )
                await error_response(refusal)(scope, receive, send_and_note)
                return
            await self._app(scope, receive, send_and_note)
        except Exception as error:  # noqa: BLE001 - whatever it was, the client gets a sentence
            self._log.exception("request_failed", path=scope["path"])
            if status == 0:
                internal = InternalError(f"{type(error).__name__} in the gateway; see its log")
                await error_response(internal)(scope, receive, send_and_note)
        finally:
            endpoint = scope.get("endpoint")
            route = getattr(endpoint, "__name__", "none")
            self._gateway.metrics.requests.labels(route=route, status=str(status)).inc()
            self._gateway.metrics.request_seconds.labels(route=route).observe(
                time.perf_counter() - started
            )

    def _has_key(self, scope: Scope) -> bool:
        key = self._gateway.api_key.encode()
        return any(
            name == b"x-api-key" and hmac.compare_digest(value, key)
            for name, value in scope["headers"]
        )


def _is_open(path: str) -> bool:
    """Download addresses carry a signature of their own."""
    return path in _OPEN_PATHS or path.startswith(DOWNLOADS)
