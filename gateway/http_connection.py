"""HTTP/1.1 connections that neither wait nor grow without bound.

uvicorn itself ends only connections that idle after an answer, and httptools bounds nothing. This
protocol adds: a deadline and a size limit for headers, a limit on open connections, an end for
clients that do not read their answer, and an end for bodies that continue after their request was
refused. The deadlines of bodies that are wanted belong to whoever reads them.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Literal

import orjson
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.metrics import Metrics
from tandem.request_settings import HttpSettings

_MAX_SURPLUS = 1024
"""Connections above the limit that still get an answer; any more are aborted."""

Deadline = Literal["header", "write", "linger"]


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
        self._deadlines: dict[Deadline, asyncio.TimerHandle] = {}
        self._header_bytes = 0
        self._in_headers = False
        self._in_body = False
        self._refused = False
        self._surplus = False

    # --- Called by the transport ----------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        surplus = len(self.connections) - self._settings.max_connections
        self._surplus = surplus > 0
        if self._surplus:
            self._metrics.refusals.labels(limit="connections").inc()
        if surplus > _MAX_SURPLUS:
            transport.abort()
            return
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._deadlines.values():
            timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._surplus:
            self._refuse(
                HTTPStatus.TOO_MANY_REQUESTS,
                "overloaded",
                f"the gateway has {self._settings.max_connections} connections, the most "
                "allowed (TANDEM_HTTP_MAX_CONNECTIONS); try again",
            )
            return
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if self._header_bytes > self._settings.max_header_bytes:  # headers so far, or trailers
            self._refuse_headers()
        elif self._is_idle() and self.timeout_keep_alive_task is None:
            self._expect_headers()  # it sent something that begins no request, like empty lines

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("write", self._settings.write_timeout)

    def resume_writing(self) -> None:
        self._cancel("write")
        super().resume_writing()

    # --- Called by the parser -------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        self._in_headers = True
        self._expect_headers()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        if self._in_headers:  # trailers are dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._cancel("header")
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
        self._cancel("linger")
        if not self._refused:
            self.scope["state"]["body_arrived"] = True
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and not self.transport.is_closing():
            # The rest of a refused body is discarded as it comes: a client that is cut off
            # while it writes would not read why.
            self._start("linger", self._settings.linger)

    # --- Deadlines and refusals -----------------------------------------------------------

    def _start(self, deadline: Deadline, seconds: float) -> None:
        """Start a deadline, unless it runs already."""
        if deadline not in self._deadlines:
            self._deadlines[deadline] = self.loop.call_later(seconds, self._expire, deadline)

    def _cancel(self, deadline: Deadline) -> None:
        timer = self._deadlines.pop(deadline, None)
        if timer is not None:
            timer.cancel()

    def _expect_headers(self) -> None:
        self._start("header", self._settings.header_timeout)

    def _expire(self, deadline: Deadline) -> None:
        del self._deadlines[deadline]
        if deadline == "header":
            if self.transport.is_closing():
                return
            if self.cycle is not None and not self.cycle.response_complete:
                self._expect_headers()  # a pipelined request waits for the answer before its own
                return
        self._metrics.timeouts.labels(what=deadline).inc()
        if deadline == "write":
            self.transport.abort()
        elif deadline == "header" and self._in_headers:
            self._refuse(
                HTTPStatus.REQUEST_TIMEOUT,
                "request_timed_out",
                f"the headers of the request did not arrive within "
                f"{self._settings.header_timeout:g} s (TANDEM_HTTP_HEADER_TIMEOUT)",
            )
        else:
            self.transport.close()

    def _is_idle(self) -> bool:
        return (
            not self._in_body
            and not self._in_headers
            and (self.cycle is None or self.cycle.response_complete)
        )

    def _refuse_headers(self) -> None:
        self._metrics.refusals.labels(limit="header_bytes").inc()
        self._refuse(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            "invalid_request",
            f"the headers have more than {self._settings.max_header_bytes} bytes, the most "
            "allowed (TANDEM_HTTP_MAX_HEADER_BYTES)",
        )

    def _refuse(self, status: HTTPStatus, type_: str, sentence: str) -> None:
        """Answer without the application, and close."""
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # in the middle of another answer
            return
        overloaded = status == HTTPStatus.TOO_MANY_REQUESTS
        category = "server" if overloaded else "user"
        body = orjson.dumps({"error": sentence, "type": type_, "category": category})
        lines = [
            f"HTTP/1.1 {status.value} {status.phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
            *(["retry-after: 1"] if overloaded else []),
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()
