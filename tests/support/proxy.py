"""A TCP proxy that a test can cut."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit


class Proxy:
    """Forwards connections to `url` while it is not cut."""

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        self._target = (target.hostname, target.port)
        self._listener: socket.socket | None = None
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._port = 0
        self.heal()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def cut(self) -> None:
        """Close every connection and refuse further ones."""
        with self._lock:
            listener, self._listener = self._listener, None
            sockets, self._sockets = self._sockets, []
        for each in (listener, *sockets):
            if each is not None:
                _close(each)

    def heal(self) -> None:
        """Accept connections again, on the old port."""
        self._listener = socket.create_server(("127.0.0.1", self._port), backlog=1024)
        self._port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # cut
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(self._target)
                with self._lock:
                    if self._listener is not listener:
                        _close(client), _close(server)
                        return
                    self._sockets += (client, server)
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=_pass_on, args=pair, daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(2**16):
            sink.sendall(data)
    _close(source)
    _close(sink)


def _close(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
