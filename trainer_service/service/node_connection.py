"""The connection between node 0 of a trainer and each of its other nodes.

Node 0 listens at the port of `rendezvous`. Another node connects and sends a `Hello`. Then both
sides send `Message`s, one line of JSON each. Neither side authenticates, like torch's store, gloo
and NCCL, so the network must keep strangers away (docs/security.md)."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import psutil
from pydantic import BaseModel, Field

from tandem.errors import WorkerStartFailed, describe
from trainer_service.compute.topology import listen_on_all_addresses
from trainer_service.service.deaths import Death

_MOST_MESSAGE_BYTES = 2**20
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.2


class ConnectionLost(Exception):
    """The other side is gone, or was silent for too long."""


class Hello(BaseModel):
    """The first message of a node. `nodes` and `ranks` count the whole trainer."""

    worker_id: str
    node: int = Field(ge=1)
    nodes: int
    ranks: int
    interface: str


class Message(BaseModel):
    """`alive` has no content. A node sends `hello` first. Node 0 sends `assign`, the assignment of
    a `rank`. Another node sends `death`, the death of one of its ranks. Either side sends `end`
    with the reason, "" for an orderly end."""

    kind: Literal["alive", "hello", "assign", "end", "death"]
    rank: int = 0
    text: str = ""
    hello: Hello | None = None
    death: Death | None = None


class Peer:
    """Messages with another node, both ways.

    A thread sends a sign of life five times per `patience` seconds."""

    def __init__(self, connection: socket.socket, *, name: str, patience: float) -> None:
        connection.settimeout(patience)
        self.name = name
        self._connection = connection
        self._patience = patience
        self._unread = b""
        self._sending = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._say_alive, name="alive", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message. If the other side is gone, the receiving thread notices."""
        with suppress(OSError), self._sending:
            self._connection.sendall(message.model_dump_json().encode() + b"\n")

    def receive(self, *, within: float | None = None) -> Message:
        """Return the next message other than `alive`.

        Raises `ConnectionLost` after `within` seconds of silence, by default this side's patience.
        """
        patience = self._patience if within is None else within
        while True:
            try:
                message = Message.model_validate_json(self._read_line(patience))
            except TimeoutError:
                raise ConnectionLost(
                    f"{self.name} was not heard of for {patience:g} s: its host or the "
                    "network between is down, or its processes are stopped"
                ) from None
            except (OSError, EOFError):
                raise ConnectionLost(f"{self.name} is gone: its connection was closed") from None
            except ValueError:
                raise ConnectionLost(f"{self.name} is no node: it sent something else") from None
            if message.kind != "alive":
                return message

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _say_alive(self) -> None:
        while not self._closed.wait(self._patience / 5):
            self.send(Message(kind="alive"))

    def _read_line(self, patience: float) -> bytes:
        until = time.monotonic() + patience
        while b"\n" not in self._unread:
            if len(self._unread) > _MOST_MESSAGE_BYTES:
                raise ValueError("the line of a message is too long")
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            if not (part := self._connection.recv(65536)):
                raise EOFError
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line


class Listener:
    """Node 0's port. `on_connection` gets each connection with its address, in its own thread."""

    def __init__(self, *, port: int, on_connection: Callable[[socket.socket, str], None]) -> None:
        """Raises `WorkerStartFailed`."""
        self._on_connection = on_connection
        self._closed = threading.Event()
        try:
            self._socket = listen_on_all_addresses(port)
        except OSError as error:
            raise WorkerStartFailed(
                f"node 0 cannot listen on port {port}, where the other nodes are to find it: "
                f"{error.strerror}"
            ) from error
        threading.Thread(target=self._accept, name="nodes", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._socket.accept()
            except (
                OSError
            ):  # the socket was closed, the client broke off, or too many files are open
                self._closed.wait(_RETRY_SECONDS)
                continue
            threading.Thread(
                target=self._on_connection,
                args=(connection, address[0]),
                name="node",
                daemon=True,
            ).start()


def connect(host: str, port: int, *, node: int, until: float) -> socket.socket:
    """Connect this `node` to node 0, which may start later.

    Raises `WorkerStartFailed` at `until`, a time of the monotonic clock."""
    while True:
        try:
            return socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS > until:
                raise WorkerStartFailed(
                    f"node {node} did not reach node 0 at {host}:{port} in time: {describe(error)}"
                ) from error
        time.sleep(_RETRY_SECONDS)


def interface_of(connection: socket.socket) -> str:
    address = ipaddress.ip_address(connection.getsockname()[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None) or address
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.address.partition("%")[0] == str(mapped):
                return str(name)
    raise WorkerStartFailed(
        f"no network interface has the address {mapped}, at which the nodes meet; "
        "set TANDEM_TRAINER_INTERFACE"
    )
