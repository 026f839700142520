"""A client connection that keeps to no rule."""

from __future__ import annotations

import json
import socket

from tests.support.gateway.running import KEY
from tests.support.waiting import wait_until


class Raw:
    def __init__(self, gate) -> None:
        host, port = gate.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def post(self, path: str, *headers: str) -> None:
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"X-API-Key: {KEY}", *headers]
        self.send(("\r\n".join(lines) + "\r\n\r\n").encode())

    def answer(self) -> tuple[int, dict[str, str], dict[str, object]]:
        """Return status, headers and JSON of one answer."""
        head, _, body = self._until(b"\r\n\r\n").partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        while len(body) < int(headers["content-length"]):
            body += self.socket.recv(65536)
        return int(first.split()[1]), headers, json.loads(body)

    def protocol_in(self, gate):
        def found():
            connections = tuple(gate.server.server_state.connections)
            return [one for one in connections if one.client == self.socket.getsockname()]

        (protocol,) = wait_until(found)
        return protocol

    def rest(self) -> bytes:
        """Return all bytes until the end of the connection."""
        data = b""
        while piece := self._received():
            data += piece
        return data

    def _received(self) -> bytes:
        try:
            return self.socket.recv(65536)
        except ConnectionResetError:
            return b""

    def _until(self, mark: bytes) -> bytes:
        data = b""
        while mark not in data:
            piece = self.socket.recv(65536)
            assert piece, f"the connection ended after {data!r}"
            data += piece
        return data
