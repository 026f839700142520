"""The HTTP server of a worker's metrics: `GET /metrics`, in a thread with its own event loop.

Anyone can connect to its port. So a connection has one request and a deadline, and the oldest of
too many is closed. On loopback, the Host must not be a site's."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from tandem.protocol.http_host import hosts_of, is_loopback, may_be_site

_MOST_CONNECTIONS = 64
_MOST_HEADER_BYTES = 16 * 2**10
_SECONDS = 10.0

_TEXT = "text/plain; charset=utf-8"


class MetricsServer:
    """Example: `port = MetricsServer(registry, host="127.0.0.1").serve_metrics(port=0)`.

    `deadline` limits a whole connection, in seconds."""

    def __init__(
        self, registry: CollectorRegistry, *, host: str, deadline: float = _SECONDS
    ) -> None:
        self._registry = registry
        self._host = host
        self._deadline = deadline
        self._open: dict[asyncio.StreamWriter, None] = {}  # oldest first

    def serve_metrics(self, *, port: int, or_any: bool = False) -> int:
        """Serve from a thread. Returns the port: a free one for port 0, and if `or_any`, for a port
        in use. Raises `OSError`."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listening = socket.create_server((self._host, port), family=family, backlog=128)
        except OSError:
            if not or_any:
                raise
            listening = socket.create_server((self._host, 0), family=family, backlog=128)
        thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listening)), name="metrics", daemon=True
        )
        thread.start()
        return int(listening.getsockname()[1])

    async def _serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(
            self._connected, sock=listening, limit=_MOST_HEADER_BYTES
        )
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > _MOST_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        writer.transport.set_write_buffer_limits(0)  # so that `drain` waits for everything
        try:
            async with asyncio.timeout(self._deadline):
                with suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        except TimeoutError:
            pass  # a slow client gets no answer
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        first, *lines = head.decode("latin-1").split("\r\n")
        method, _, target = first.partition(" ")
        headers = [
            (name.strip().lower(), value.strip())
            for name, colon, value in (line.partition(":") for line in lines)
            if colon
        ]
        hosts = hosts_of((name.encode(), value.encode("latin-1")) for name, value in headers)
        if len(hosts) > 1 or (is_loopback(self._host) and any(map(may_be_site, hosts))):
            sentence = (
                "the Host of the request is no name of this machine; ask for "
                f"http://{self._host}:PORT/metrics"
            )
            return _response(HTTPStatus.MISDIRECTED_REQUEST, sentence.encode())
        if target.partition(" ")[0].partition("?")[0] != "/metrics":
            return _response(HTTPStatus.NOT_FOUND, b"the metrics are at /metrics")
        if method not in ("GET", "HEAD"):
            allow = {"allow": "GET, HEAD"}
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, b"use GET", headers=allow)
        encode, kind = choose_encoder(dict(headers).get("accept", ""))
        return _response(
            HTTPStatus.OK, encode(self._registry), kind=kind, with_body=method == "GET"
        )


def _response(
    status: HTTPStatus,
    body: bytes,
    *,
    kind: str = _TEXT,
    headers: Mapping[str, str] | None = None,
    with_body: bool = True,
) -> bytes:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"content-type: {kind}",
        f"content-length: {len(body)}",
        "connection: close",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + (body if with_body else b"")
