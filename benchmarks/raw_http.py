"""A minimal HTTP client, so that a measurement shows the server."""

from __future__ import annotations

import asyncio
from types import TracebackType
from urllib.parse import urlsplit

import orjson


class Connection:
    """A persistent connection for one request at a time, reopened if closed while idle.

    Raises `OSError` or `asyncio.IncompleteReadError` if the server closes it during a request."""

    def __init__(self, *, url: str, key: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._host, self._port = parts.hostname, parts.port
        self._head = f"Host: {parts.netloc}\r\nX-API-Key: {key}\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Connection:
        self._streams = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._streams is not None:
            self._streams[1].close()

    async def post(self, path: str, body: object, *, timeout: float = 120.0) -> tuple[int, bytes]:
        """Send a request. Return status and body. Raises `TimeoutError`."""
        if self._streams is None or self._streams[0].at_eof():
            if self._streams is not None:
                self._streams[1].close()
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        content = orjson.dumps(body)
        writer.write(
            f"POST {path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        async with asyncio.timeout(timeout):
            head = await reader.readuntil(b"\r\n\r\n")
            size = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    size = int(value)
            return int(head.split(None, 2)[1]), await reader.readexactly(size)
