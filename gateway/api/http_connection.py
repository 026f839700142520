"""HTTP/1.1 connections with bounded waiting and size, which uvicorn and httptools lack.

Headers have a deadline and a size limit, and connections a limit. Clients that do not read their
answer, and bodies that continue after a refusal, are ended. The reader of a body sets its deadline.

At the limit, a new connection replaces the one that has been without a request for longest. If all
have requests, a reserve still answers `VITAL` requests."""

from __future__ import annotations

import asyncio
import contextvars
import resource
from collections import deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Literal

import httptools
import orjson
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.metrics import Metrics
from gateway.owners.counted_lines import CountedLines

MAX_CONNECTIONS = 8192
"""Open connections. Further ones get a 429."""
MAX_HEADER_BYTES = 64 * 2**10
HEADER_TIMEOUT = 20.0
"""Seconds for a request's headers."""
WRITE_TIMEOUT = 60.0
"""Seconds before a client that reads nothing is disconnected."""
LINGER = 10.0
"""Seconds for which a refused body is discarded, so that the client can read the answer."""
KEEP_ALIVE = 75
"""Seconds before an idle connection is closed."""
_RESERVE = 1024
"""Connections above the limit that still get an answer."""

VITAL = frozenset({"/api/v1/healthz", "/api/v1/readyz", "/api/v1/session_heartbeat"})
"""Cheap requests that keep the gateway and its clients from being taken for dead."""

STARTS, VITAL_STARTS = 8, 64
"""Requests, and `VITAL` ones beside them, that begin in one turn of the event loop. A burst of
thousands would make one turn of seconds."""

GRACEFUL_SECONDS = 5
"""Seconds that a stop waits for answers. Unread answers are cut off a second earlier."""

Deadline = Literal["header", "write", "linger", "stop"]


class Starts:
    """Begins requests in order, at most `STARTS` in one turn of the event loop. New connections and
    `VITAL` requests get their turn between two parts of a burst. A request whose connection closes
    before its turn never begins."""

    def __init__(self) -> None:
        self._left, self._vital_left = STARTS, VITAL_STARTS
        self._waiting: deque[tuple[RequestResponseCycle, Callable[[], None]]] = deque()
        self._next_turn: asyncio.Handle | None = None
        self._context = contextvars.copy_context()  # not that of a request

    def begin_request(self, cycle: RequestResponseCycle, start: Callable[[], None]) -> None:
        if self._vital_left and cycle.scope["path"] in VITAL:
            self._vital_left -= 1
            start()
        elif self._left:
            self._left -= 1
            start()
        else:
            self._waiting.append((cycle, start))
        if self._next_turn is None:
            loop = asyncio.get_running_loop()
            self._next_turn = loop.call_soon(self._continue, context=self._context)

    def _continue(self) -> None:
        self._next_turn, self._left, self._vital_left = None, STARTS, VITAL_STARTS
        while self._left and self._waiting:
            cycle, start = self._waiting.popleft()
            if not cycle.disconnected:
                self.begin_request(cycle, start)


class Connections:
    """A server's open connections, and the choice of one to close.

    `most` may be open, at most three quarters of the process's file limit, because other parts need
    files. `_waiting` has those without a request, the longest waiting first."""

    def __init__(self, most: int, *, metrics: Metrics) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4
        self._reserve = min(_RESERVE, files // 8)
        self.most = min(most, files - self._reserve)
        self._metrics = metrics
        self.starts = Starts()
        self.ending = False
        """Whether each connection closes after its next answer."""
        self._open: set[BoundedProtocol] = set()
        self._waiting: dict[BoundedProtocol, None] = {}
        self._surplus: dict[BoundedProtocol, None] = {}

    def admit_connection(self, new: BoundedProtocol) -> bool:
        """Add a connection. Return False for a surplus one, which only takes `VITAL` requests."""
        if len(self._open) >= self.most:
            self._metrics.refusals.labels(limit="connections").inc()
            if not self._waiting:
                if len(self._surplus) >= self._reserve:
                    self._close_first(self._surplus)
                self._surplus[new] = None
                return False
            self._close_first(self._waiting)
        self._open.add(new)
        self._waiting[new] = None
        return True

    def begin(self, connection: BoundedProtocol) -> None:
        self._waiting.pop(connection, None)

    def wait(self, connection: BoundedProtocol) -> None:
        if connection in self._open:
            self._waiting[connection] = None

    def remove(self, connection: BoundedProtocol) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)
        self._surplus.pop(connection, None)

    def _close_first(self, connections: dict[BoundedProtocol, None]) -> None:
        first = next(iter(connections))
        self.remove(first)  # at once, because the transport reports its end later
        first.transport.close()


class BoundedProtocol(HttpToolsProtocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        metrics: Metrics,
        all_connections: Connections,
        malformed: CountedLines,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._all = all_connections
        self._malformed = malformed
        self._metrics = metrics
        self._deadlines: dict[Deadline, asyncio.TimerHandle] = {}
        self._header_bytes = 0
        self._unreported_bytes = 0
        """Received since the parser last reported anything, such as a part of a header."""
        self._in_headers = False
        self._in_body = False
        self._refused = False
        self._surplus = False
        self._answering: RequestResponseCycle | None = None

    # --- Called by the transport ----------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._surplus = not self._all.admit_connection(self)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._deadlines.values():
            timer.cancel()
        self._all.remove(self)
        super().connection_lost(exc)
        # uvicorn only notifies the newest request, which may wait for earlier answers. Others would
        # wait forever, or write to a closed transport.
        self.pipeline.clear()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        self._answering = None

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._unreported_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The request was answered without an upgrade, so the rest is unusable.
            self._note_malformed("upgrade")
        except httptools.HttpParserError:
            self._note_malformed("not HTTP")
            self._refuse(HTTPStatus.BAD_REQUEST, "malformed_payload", "the request is not HTTP/1.1")
            return
        if self._refused or self.transport.is_closing():
            return
        # Headers or trailers. The parser reports a header at its end, which may never come.
        if self._header_bytes + self._unreported_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()
        elif self._is_idle() and self.timeout_keep_alive_task is None:
            self._expect_headers()  # it sent bytes before a request, like empty lines

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("write", WRITE_TIMEOUT)

    def resume_writing(self) -> None:
        self._cancel("write")
        super().resume_writing()

    def shutdown(self) -> None:
        super().shutdown()
        if not self.transport.is_closing():
            self._start("stop", GRACEFUL_SECONDS - 1)

    # --- Called by the parser -------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        self._in_headers = True
        self._expect_headers()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._unreported_bytes = 0
        self._header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._unreported_bytes = 0
        self._header_bytes += len(name) + len(value) + 4
        if self._in_headers:  # trailers are dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unreported_bytes = 0
        self._in_headers = False
        self._cancel("header")
        if self._refused:
            return
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()
            return
        self._in_body = True
        if self._surplus and self.url.partition(b"?")[0].decode("latin-1") not in VITAL:
            self._refuse(
                HTTPStatus.TOO_MANY_REQUESTS,
                "overloaded",
                f"the gateway has {self._all.most} connections with a request, the most allowed; "
                "try again",
            )
            return
        self._all.begin(self)
        super().on_headers_complete()
        if self._surplus or self._all.ending:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._unreported_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._unreported_bytes = 0
        self._in_body = False
        self._cancel("linger")
        if not self._refused:
            self.scope["state"]["body_arrived"] = True
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        start = partial(super()._start_asgi_task, cycle, app)
        self._all.starts.begin_request(cycle, start)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else a pipelined one has begun
            self._all.wait(self)
        if self._in_body and not self.transport.is_closing():
            # Discard the rest of a refused body. A client that is cut off while writing would not
            # read the answer.
            self._start("linger", LINGER)

    # --- Deadlines and refusals -----------------------------------------------------------

    def _start(self, deadline: Deadline, seconds: float) -> None:
        if deadline not in self._deadlines:
            self._deadlines[deadline] = self.loop.call_later(seconds, self._expire, deadline)

    def _cancel(self, deadline: Deadline) -> None:
        timer = self._deadlines.pop(deadline, None)
        if timer is not None:
            timer.cancel()

    def _expect_headers(self) -> None:
        self._start("header", HEADER_TIMEOUT)

    def _expire(self, deadline: Deadline) -> None:
        del self._deadlines[deadline]
        if deadline == "header":
            if self.transport.is_closing():
                return
            if self.cycle is not None and not self.cycle.response_complete:
                self._expect_headers()  # a pipelined request waits for an earlier answer
                return
        self._metrics.timeouts.labels(what=deadline).inc()
        if deadline in ("write", "stop"):
            self.transport.abort()
        elif deadline == "header" and self._in_headers:
            self._refuse(
                HTTPStatus.REQUEST_TIMEOUT,
                "request_timed_out",
                f"the headers of the request did not arrive within {HEADER_TIMEOUT:g} s",
            )
        else:
            self.transport.close()

    def _is_idle(self) -> bool:
        return (
            not self._in_body
            and not self._in_headers
            and (self.cycle is None or self.cycle.response_complete)
        )

    def _note_malformed(self, reason: str) -> None:
        """Count a malformed request, without uvicorn's line for each."""
        self._malformed.note(reason=reason, address=self.client[0] if self.client else "")

    def _refuse_headers(self) -> None:
        self._metrics.refusals.labels(limit="header_bytes").inc()
        self._refuse(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            "invalid_request",
            f"the headers have more than {MAX_HEADER_BYTES} bytes, the most allowed",
        )

    def _refuse(self, status: HTTPStatus, type_: str, sentence: str) -> None:
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # in the middle of another answer
            return
        if self._in_body and self.cycle is not None and self.cycle.scope is self.scope:
            self.transport.close()  # this request has its answer
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
