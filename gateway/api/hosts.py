"""Refuses requests with a foreign Host name (`tandem.protocol.http_host`).

The public URL's name, and names that no web site can have, are allowed. Others are refused on
loopback, and elsewhere if there is a public URL."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.errors import ErrorResponses
from gateway.metrics import Metrics
from tandem.errors import InvalidRequest
from tandem.protocol.http_host import hosts_of, is_loopback, may_be_site
from tandem.settings.gateway import GatewaySettings


class HostBoundary:
    """Answers a wrong Host with 400 before all other checks."""

    def __init__(
        self, app: ASGIApp, *, settings: GatewaySettings, metrics: Metrics, errors: ErrorResponses
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._errors = errors
        self._on_loopback = is_loopback(settings.host)
        self._public = (urlsplit(settings.public_url).hostname or "").removesuffix(".")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (why := self._fault(scope["headers"])):
            self._metrics.refusals.labels(limit="host").inc()
            response = self._errors.response(InvalidRequest(why), path=scope["path"])
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _fault(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        names = hosts_of(headers)
        if len(names) > 1:
            return "the request has several Host headers; send one"
        if all(map(self._is_own, names)):
            return ""
        return (
            f"the request reached this gateway by the name {names[0][:100]!r}, which is not its "
            "own; use its address, or set TANDEM_PUBLIC_URL to the one by which clients reach it"
        )

    def _is_own(self, name: str) -> bool:
        if not may_be_site(name) or (name and name == self._public):
            return True
        return not self._on_loopback and not self._public
