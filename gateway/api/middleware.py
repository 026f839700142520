"""What surrounds every request, as pure ASGI, since it is on the way of every one.

`RequestBoundary` (outermost) authenticates, times and audits, and has the last word on errors;
`RequestReservations` counts what an open request holds. Both take the gateway from the
application's state: it exists only once the lifespan has begun.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import cast

from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.dependencies import AuditNote
from gateway.api.errors import ErrorResponses
from gateway.api.routing import OPEN_ROLES, PathOperation
from gateway.auth.audit import UNKNOWN, Entry
from gateway.auth.identity import Caller
from gateway.auth.keys import is_loopback
from gateway.core import Gateway
from gateway.limits import Reservation
from tandem.errors import InternalError, Overloaded, TokenRefused, Unauthenticated
from tandem.telemetry import get_log

_PIECE = 256 * 2**10
"""Bytes of an answer that are handed over at once: what the connection holds for a client that
reads slowly."""


class RequestBoundary:
    """Refuses requests without a valid key (X-API-Key, or Authorization: Bearer), and puts the
    `Caller` on the rest; counts and times all of them; notes changes in the audit log."""

    def __init__(
        self, app: ASGIApp, *, routes: Sequence[PathOperation], errors: ErrorResponses
    ) -> None:
        self._app = app
        self._audited = [(route.audit, route) for route in routes if route.audit is not None]
        self._open = [
            (route.path.partition("{")[0], route) for route in routes if route.role in OPEN_ROLES
        ]
        self._errors = errors
        self._log = get_log()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gateway = _gateway(scope)
        started = time.perf_counter()
        status = 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if not self._is_open(scope):
                state = scope.setdefault("state", {})
                state["caller"] = gateway.identity.identify(_credential(scope))
            await self._app(scope, receive, send_and_note)
        except Unauthenticated as refusal:
            self._note_refusal(refusal, scope)
            await self._unauthenticated(refusal, scope, receive, send_and_note)
        except Exception as error:  # noqa: BLE001 - whatever it was, the client gets a sentence
            self._log.exception("request_failed", path=scope["path"])
            if status == 0:
                internal = InternalError(f"{type(error).__name__} in the gateway; see its log")
                response = self._errors.response(internal, path=scope["path"])
                await response(scope, receive, send_and_note)
        finally:
            route = scope.get("route")
            name = route.name if isinstance(route, PathOperation) else "none"
            gateway.metrics.requests.labels(route=name, status=str(status)).inc()
            gateway.metrics.request_seconds.labels(route=name).observe(
                time.perf_counter() - started
            )
            if isinstance(route, PathOperation):
                _audit(scope, route, status=status)

    def _is_open(self, scope: Scope) -> bool:
        """Whether a request needs no key: a `local` route does without one on this machine, and
        not for what a proxy on this machine passes on."""
        path: str = scope["path"]
        for prefix, route in self._open:
            if path == route.path or (prefix != route.path and path.startswith(prefix)):
                return route.role != "local" or (
                    is_loopback(_address(scope))
                    and not any(name in _FORWARDED for name, _ in scope["headers"])
                )
        return False

    def _note_refusal(self, refusal: Unauthenticated, scope: Scope) -> None:
        """Count and log a refused key, which itself is in neither."""
        gateway = _gateway(scope)
        gateway.metrics.refused_keys.labels(reason=refusal.type).inc()
        self._log.warning(
            "key_refused", reason=refusal.type, address=_address(scope), path=scope["path"][:200]
        )
        for action, route in self._audited:
            match, found = route.matches(scope)
            if match is Match.FULL:
                entry = Entry(
                    actor=UNKNOWN,
                    action=action,
                    target=_target(found["path_params"]),
                    address=_address(scope),
                    status=refusal.status,
                    detail={"reason": refusal.type},
                )
                gateway.audit.record(entry)
                return

    async def _unauthenticated(
        self, refusal: Unauthenticated, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer as RFC 6750 has it: the SDK exchanges its key again for a refused token."""
        response = self._errors.response(refusal, path=scope["path"])
        response.headers["WWW-Authenticate"] = (
            'Bearer realm="tandem", error="invalid_token"'
            if isinstance(refusal, TokenRefused)
            else 'Bearer realm="tandem"'
        )
        await response(scope, receive, send)


class RequestReservations:
    """Bounds the open requests of each owner, releases the memory reserved for their bodies, and
    hands large answers over in pieces."""

    def __init__(self, app: ASGIApp, *, errors: ErrorResponses) -> None:
        self._app = app
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limits = _gateway(scope).limits
        state = scope.setdefault("state", {})
        caller = state.get("caller")
        owner = caller.owner if caller is not None else ""
        try:
            open_request = limits.requests.reserve(owner)
        except Overloaded as error:
            await self._errors.response(error, path=scope["path"])(scope, receive, send)
            return
        body = state["body_reservation"] = Reservation(limits.bodies, owner, amount=0)

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
            body.release()
            open_request.release()


_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for"})


def _gateway(scope: Scope) -> Gateway:
    return cast(Gateway, scope["app"].state.gateway)


def _audit(scope: Scope, route: PathOperation, *, status: int) -> None:
    """Record a request to change something, by a known caller, that reached the route (whose path
    may take other methods, where the status is 405)."""
    state = scope.get("state", {})
    caller: Caller | None = state.get("caller")
    if route.audit is None or caller is None or status == 405:
        return
    note: AuditNote = state.get("audit_note") or AuditNote()
    entry = Entry(
        actor=caller.urn,
        action=route.audit,
        target=note.target or _target(scope.get("path_params", {})),
        address=_address(scope),
        status=status,
        detail={"key": caller.key_id, **note.detail},
    )
    _gateway(scope).audit.record(entry)


def _credential(scope: Scope) -> bytes:
    headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # of several, the first
    if (key := headers.get(b"x-api-key")) is not None:
        return key
    scheme, _, credential = headers.get(b"authorization", b"").partition(b" ")
    return credential.strip() if scheme.lower() == b"bearer" else b""


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""


def _target(named: Mapping[str, str]) -> str:
    """Return what a path names: `tinker://RUN/KIND/NAME` for a checkpoint, else its ids."""
    if {"run_id", "kind", "name"} <= named.keys():
        return f"tinker://{named['run_id']}/{named['kind']}/{named['name']}"
    return "/".join(named.values())
