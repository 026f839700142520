"""HTTP/1.1 connections that can neither wait nor grow for ever.

uvicorn's own protocol has a deadline for idle connections alone. This one adds: a deadline and
a bound for headers, a bound on open connections, an end for clients that take nothing of their
answer, and an end for bodies that go on after their request was refused. Deadlines of bodies
that are wanted are with whoever reads them (`gateway/routes/wire.py`).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import cast

import orjson
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.metrics import Metrics
from tandem.settings import HttpSettings

_MOST_SURPLUS = 1024
"""Connections above the bound that are still told so; more are cut without a word."""

_REASONS = {
    408: "Request Timeout",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
}


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        settings: HttpSettings,
        metrics: Metrics,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._settings = settings
        self._metrics = metrics
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._in_headers = False
        self._in_body = False
        self._refused = False
        self._surplus = False

    # --- What the transport says ----------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        surplus = len(self.connections) - self._settings.max_connections
        self._surplus = surplus > 0
        if self._surplus:
            self._metrics.refusals.labels(limit="connections").inc()
        if surplus > _MOST_SURPLUS:
            transport.abort()
            return
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._write_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._surplus:
            self._refuse(
                429,
                "overloaded",
                f"the gateway has {self._settings.max_connections} connections, the most "
                "allowed (TANDEM_HTTP_MAX_CONNECTIONS); try again",
            )
            return
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if self._header_bytes > self._settings.max_header_bytes:  # not yet, or trailers
            self._refuse_headers()
        elif self._is_idle() and self.timeout_keep_alive_task is None:
            self._start_header_timer()  # empty lines, say, which begin no request

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(
                self._settings.write_timeout, self._write_timed_out
            )

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    # --- What the parser says -------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        self._in_headers = True
        self._start_header_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        if not self._in_headers:  # a trailer: nobody here wants one
            return
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_header_timer()
        if self._refused:
            return
        if self._header_bytes > self._settings.max_header_bytes:
            self._refuse_headers()
            return
        self._in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and self._linger_timer is None and not self.transport.is_closing():
            # The rest of a body that nobody wants is thrown away as it comes: a client that
            # is cut off while it writes would not read why.
            self._linger_timer = self.loop.call_later(
                self._settings.linger, self._lingered_long_enough
            )

    # --- Ends -----------------------------------------------------------------------------

    def _is_idle(self) -> bool:
        return (
            not self._in_body
            and not self._in_headers
            and (self.cycle is None or self.cycle.response_complete)
        )

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(
                self._settings.header_timeout, self._header_timed_out
            )

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _header_timed_out(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # A second request has begun before the first was answered; it waits for that.
            self._start_header_timer()
            return
        self._metrics.timeouts.labels(what="header").inc()
        if not self._in_headers:  # nothing was asked
            self.transport.close()
            return
        self._refuse(
            408,
            "request_timed_out",
            f"the headers of the request did not arrive within "
            f"{self._settings.header_timeout:g} s (TANDEM_HTTP_HEADER_TIMEOUT)",
        )

    def _write_timed_out(self) -> None:
        self._write_timer = None
        self._metrics.timeouts.labels(what="write").inc()
        self.transport.abort()

    def _lingered_long_enough(self) -> None:
        self._linger_timer = None
        self._metrics.timeouts.labels(what="linger").inc()
        self.transport.close()

    def _refuse_headers(self) -> None:
        self._metrics.refusals.labels(limit="header_bytes").inc()
        self._refuse(
            431,
            "invalid_request",
            f"the headers have more than {self._settings.max_header_bytes} bytes, the most "
            "allowed (TANDEM_HTTP_MAX_HEADER_BYTES)",
        )

    def _refuse(self, status: int, type_: str, sentence: str) -> None:
        """Answers without asking the application, and closes."""
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # in the middle of another answer
            return
        category = "server" if status == 429 else "user"
        body = orjson.dumps({"error": sentence, "type": type_, "category": category})
        lines = [
            f"HTTP/1.1 {status} {_REASONS[status]}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        ]
        if status == 429:
            lines.append("retry-after: 1")
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()


def bounded_protocol(*, settings: HttpSettings, metrics: Metrics) -> type[asyncio.Protocol]:
    """What uvicorn calls to make a protocol, as `Config(http=…)` takes it."""
    return cast(
        type[asyncio.Protocol], partial(BoundedProtocol, settings=settings, metrics=metrics)
    )
