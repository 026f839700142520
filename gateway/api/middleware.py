"""What surrounds every request: who asks, the clock, the audit log, the last word on errors.

Pure ASGI, since this is on the way of every request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.wire import error_response
from gateway.auth.audit import ACTIONS, NOT_AUDITED
from gateway.auth.identity import Caller
from gateway.auth.listening import is_loopback
from gateway.checkpoints.downloads import PREFIX as DOWNLOADS
from gateway.core import Gateway
from gateway.usage.trace_exports import PREFIX as TRACES
from tandem.errors import InternalError, TokenRefused, Unauthenticated
from tandem.telemetry import get_log

_OPEN_PATHS = frozenset({"/api/v1/healthz"})
_LOCAL_PATHS = frozenset({"/metrics", "/openapi.json"})
_CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class RequestBoundary:
    """Refuses what has no valid key (X-API-Key, or Authorization: Bearer), and puts the `Caller`
    on the rest, which it counts, times, and notes in the audit log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._log = get_log()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gateway: Gateway = scope["app"].state.gateway
        started = time.perf_counter()
        status = 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if not _is_open(scope):
                state = scope.setdefault("state", {})
                state["caller"] = gateway.identity.identify(_credential(scope))
            await self._app(scope, receive, send_and_note)
        except Unauthenticated as refusal:
            self._note_refusal(refusal, scope)
            await _unauthenticated(refusal, scope, receive, send_and_note)
        except Exception as error:  # noqa: BLE001 - whatever it was, the client gets a sentence
            self._log.exception("request_failed", path=scope["path"])
            if status == 0:
                internal = InternalError(f"{type(error).__name__} in the gateway; see its log")
                await error_response(internal, path=scope["path"])(scope, receive, send_and_note)
        finally:
            endpoint = scope.get("endpoint")
            route = getattr(endpoint, "__name__", "none")
            gateway.metrics.requests.labels(route=route, status=str(status)).inc()
            gateway.metrics.request_seconds.labels(route=route).observe(
                time.perf_counter() - started
            )
            if _is_audited(scope, route=route, status=status):
                self._audit(scope, route=route, status=status)

    def _note_refusal(self, refusal: Unauthenticated, scope: Scope) -> None:
        """Counted and logged; what was presented is not in either."""
        gateway: Gateway = scope["app"].state.gateway
        gateway.metrics.refused_keys.labels(reason=refusal.type).inc()
        self._log.warning(
            "key_refused", reason=refusal.type, address=_address(scope), path=scope["path"][:200]
        )
        route, named = _destination(scope)
        if route and route not in NOT_AUDITED:
            gateway.audit.record_unknown(
                action=ACTIONS.get(route, route),
                target=_target(named),
                address=_address(scope),
                status=refusal.status,
                reason=refusal.type,
            )

    def _audit(self, scope: Scope, *, route: str, status: int) -> None:
        state = scope["state"]
        caller: Caller = state["caller"]
        named: Mapping[str, str] = scope.get("path_params", {})
        scope["app"].state.gateway.audit.record(
            actor=caller.urn,
            action=ACTIONS.get(route, route),
            target=state.get("audit_target") or _target(named),
            address=_address(scope),
            status=status,
            detail={"key": caller.key_id, **state.get("audit_detail", {})},
        )


def _is_audited(scope: Scope, *, route: str, status: int) -> bool:
    """Whether it was a request to change something, by somebody who is known, that got to a
    route (which has other methods, where the status is 405)."""
    return (
        scope["method"] in _CHANGING
        and "caller" in scope.get("state", {})
        and "endpoint" in scope
        and route not in NOT_AUDITED
        and status != 405
    )


def _destination(scope: Scope) -> tuple[str, Mapping[str, str]]:
    """The route that changes something to which a request was on its way, and what its path
    names; "" for none."""
    if scope["method"] in _CHANGING:
        for route in scope["app"].routes:
            match, found = route.matches(scope)
            if match is Match.FULL:
                return found["endpoint"].__name__, found["path_params"]
    return "", {}


def _credential(scope: Scope) -> bytes:
    headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # of several, the first
    if (key := headers.get(b"x-api-key")) is not None:
        return key
    scheme, _, credential = headers.get(b"authorization", b"").partition(b" ")
    return credential.strip() if scheme.lower() == b"bearer" else b""


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""


async def _unauthenticated(
    refusal: Unauthenticated, scope: Scope, receive: Receive, send: Send
) -> None:
    """A refused token is marked as RFC 6750 has it: the SDK then exchanges its key once more."""
    response = error_response(refusal, path=scope["path"])
    response.headers["WWW-Authenticate"] = (
        'Bearer realm="tandem", error="invalid_token"'
        if isinstance(refusal, TokenRefused)
        else 'Bearer realm="tandem"'
    )
    await response(scope, receive, send)


def _target(named: Mapping[str, str]) -> str:
    """What a path names: `tinker://RUN/KIND/NAME` for a checkpoint, else the ids in it."""
    if {"run_id", "kind", "name"} <= named.keys():
        return f"tinker://{named['run_id']}/{named['kind']}/{named['name']}"
    return "/".join(named.values())


def _is_open(scope: Scope) -> bool:
    """Addresses of downloads and traces carry a signature of their own. Metrics and the
    description of the routes are open to this machine, and not to what a proxy on it passes on."""
    path: str = scope["path"]
    if path in _LOCAL_PATHS:
        forwarded = any(name in (b"forwarded", b"x-forwarded-for") for name, _ in scope["headers"])
        return not forwarded and is_loopback(_address(scope))
    return path in _OPEN_PATHS or path.startswith((DOWNLOADS, TRACES))
