"""The middleware around every request, as pure ASGI for speed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from typing import cast

from prometheus_client import Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.dependencies import AuditNote
from gateway.api.errors import ErrorResponses
from gateway.api.routing import KEY_REFUSED, PathOperation
from gateway.core import Gateway
from gateway.metrics import Metrics
from gateway.owners.auth.audit import UNKNOWN, Entry
from gateway.owners.auth.identity import Caller
from tandem.errors import InternalError
from tandem.telemetry import get_log

_PIECE = 256 * 2**10
"""Bytes of an answer per piece. A connection holds this much for a slow client."""


class RequestBoundary:
    """Counts and times requests, writes the audit log, splits large answers, and answers unexpected
    errors."""

    def __init__(self, app: ASGIApp, *, errors: ErrorResponses) -> None:
        self._app = app
        self._errors = errors
        self._metrics_of = cache(_metrics_of)  # a lookup costs more than counting
        self._log = get_log()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0

        async def send_in_pieces(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
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
        except Exception as error:  # noqa: BLE001 - whatever it was, the client gets a sentence
            self._log.exception("request_failed", path=scope["path"])
            if status == 0:
                internal = InternalError(f"{type(error).__name__} in the gateway; see its log")
                response = self._errors.response(internal, path=scope["path"])
                await response(scope, receive, send_in_pieces)
        finally:
            self._note(scope, status=status, seconds=time.perf_counter() - started)

    def _note(self, scope: Scope, *, status: int, seconds: float) -> None:
        gateway = cast(Gateway, scope["app"].state.gateway)
        route, state = scope.get("route"), scope.get("state", {})
        refused: str | None = state.get(KEY_REFUSED)
        name = route.name if isinstance(route, PathOperation) and refused is None else "none"
        count, duration = self._metrics_of(gateway.metrics, name, status)
        count.inc()
        duration.observe(seconds)
        client = scope.get("client")
        address = client[0] if client else ""
        if refused is not None:
            gateway.refused_keys.note(reason=refused, address=address, path=scope["path"])
        if not isinstance(route, PathOperation) or route.audit is None:
            return
        if scope["method"] not in route.methods:  # the path takes other methods
            return
        caller: Caller | None = state.get("caller")
        note: AuditNote = state.get("audit_note") or AuditNote()
        if caller is not None:
            actor, detail = caller.urn, {"key": caller.key_id, **note.detail}
        elif refused is not None:
            actor, detail = UNKNOWN, {"reason": refused}
        else:
            return
        entry = Entry(
            actor=actor,
            action=route.audit,
            target=note.target or _target(scope["path_params"]),
            address=address,
            status=status,
            detail=detail,
        )
        gateway.audit.record(entry)


def _metrics_of(metrics: Metrics, route: str, status: int) -> tuple[Counter, Histogram]:
    return (
        metrics.requests.labels(route=route, status=str(status)),
        metrics.request_seconds.labels(route=route),
    )


def _target(named: Mapping[str, str]) -> str:
    """Return the thing in the path: `tinker://RUN/KIND/NAME` for a checkpoint, else its ids."""
    if {"run_id", "kind", "name"} <= named.keys():
        return f"tinker://{named['run_id']}/{named['kind']}/{named['name']}"
    return "/".join(named.values())
