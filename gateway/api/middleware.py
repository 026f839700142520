"""The middleware around every request, as pure ASGI for speed."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import cast
from urllib.parse import unquote, urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, Counter, Histogram, generate_latest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.dependencies import AuditNote
from gateway.api.errors import ErrorResponses, json_response
from gateway.api.routing import KEY_REFUSED, PathOperation, is_from_this_machine
from gateway.core import Gateway
from gateway.metrics import Metrics
from gateway.owners.auth.audit import UNKNOWN, Entry
from gateway.owners.auth.identity import Caller
from tandem.errors import InternalError, InvalidRequest, StandingBy
from tandem.protocol.http_host import hosts_of, is_loopback, may_be_site
from tandem.settings.gateway import GatewaySettings
from tandem.telemetry import get_log

_PIECE = 256 * 2**10
"""Bytes of an answer per piece. A connection holds this much for a slow client."""

_REPEATED = re.compile(r"(?<![:/])/{2,}")
"""Slashes that count as one, except those of `tinker://` in a model's name."""

_STANDBY = "this gateway is a standby, and another one serves; ask again soon"


class RequestBoundary:
    """Normalizes the path, because all checks read it. Refuses a foreign Host. Answers as a standby
    until the gateway has `opened`. Then counts and times requests, writes the audit log, splits
    large answers, and answers unexpected errors.

    A standby holds requests in case it takes over, because the SDK repeats a refused one after a
    second: a `retrieve_future` for up to `longest_wait` seconds, others for the leader's timeout at
    most."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: GatewaySettings,
        metrics: Metrics,
        errors: ErrorResponses,
        opened: asyncio.Event,
        longest_wait: float,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._errors = errors
        self._opened = opened
        self._longest_wait = longest_wait
        self._patience = min(settings.leader_timeout, longest_wait)
        self._host_fault = lru_cache(64)(HostRule(settings).fault)  # most clients use one name
        self._metrics_of = cache(_metrics_of)  # a lookup costs more than counting
        self._log = get_log()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = scope["raw_path"].decode("latin-1")
        if (plain := plain_path(sent)) != sent:
            scope = {**scope, "path": unquote(plain), "raw_path": plain.encode("latin-1")}
        response = None
        if why := self._host_fault(*hosts_of(scope["headers"])):
            self._metrics.refusals.labels(limit="host").inc()
            response = self._errors.response(InvalidRequest(why), path=scope["path"])
        elif not self._opened.is_set():
            response = await self._standby_response(scope)
        if response is not None:
            await response(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _standby_response(self, scope: Scope) -> Response | None:
        """Return the answer of a waiting gateway, None if it has opened meanwhile."""
        match scope["path"]:
            case "/api/v1/healthz":
                return json_response({"status": "ok"})
            case "/metrics" if is_from_this_machine(scope):
                found = generate_latest(self._metrics.registry)
                return Response(found, media_type=CONTENT_TYPE_LATEST)
            case "/api/v1/readyz" | "/metrics":
                pass
            case "/api/v1/retrieve_future":
                if await self._opens(within=self._longest_wait):
                    return None
                waiting = {"queue_state": "paused_capacity", "queue_state_reason": _STANDBY}
                return json_response({"type": "try_again", **waiting}, status=408)
            case _:
                if await self._opens(within=self._patience):
                    return None
        return self._errors.response(StandingBy(_STANDBY), path=scope["path"])

    async def _opens(self, *, within: float) -> bool:
        try:
            await asyncio.wait_for(self._opened.wait(), within)
        except TimeoutError:
            return False
        return True

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            gateway.refused_keys.note(reason=refused, address=address, path=scope["path"][:200])
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


class HostRule:
    """The names by which clients may reach the gateway (`tandem.protocol.http_host`).

    The public URL's name, and names that no web site can have, are allowed. Others are refused on
    loopback, and elsewhere if there is a public URL."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._public = (urlsplit(settings.public_url).hostname or "").removesuffix(".")
        self._allows_sites = not is_loopback(settings.host) and not self._public

    def fault(self, *names: str) -> str:
        """Return why a request with these hosts is refused, or ""."""
        if len(names) > 1:
            return "the request has several Host headers; send one"
        if self._allows_sites or all(map(self._is_own, names)):
            return ""
        return (
            f"the request reached this gateway by the name {names[0][:100]!r}, which is not its "
            "own; use its address, or set TANDEM_PUBLIC_URL to the one by which clients reach it"
        )

    def _is_own(self, name: str) -> bool:
        return not may_be_site(name) or bool(name and name == self._public)


def plain_path(path: str) -> str:
    """Return an encoded path with single slashes and none at its end, since clients often write
    `//v1/models` or `/v1/models/`. A proxy may not reach the target of a redirect. Encoded slashes
    stay, as parts of names.

    Example: `plain_path("//v1//models/")` is `"/v1/models"`."""
    return _REPEATED.sub("/", path).rstrip("/") or "/"


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
