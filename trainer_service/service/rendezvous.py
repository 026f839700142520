"""Connections between the nodes of a trainer, which prove to each other that they know its secret.

Node 0 listens. Who connects is sent a challenge, answers with a `Hello` and a proof, and gets a
proof in return:

    node 0 → node   a nonce
    node → node 0   the hello, with a nonce of its own; HMAC(key, "node", both)
    node 0 → node   HMAC(key, "node 0", both)

The key follows from the secret of the worker's specification, which is never sent. Who does not
know it is told nothing and disconnected, after `_HANDSHAKE_SECONDS` at the latest. Then either side
sends `Message`s, a line of JSON each (`Peer`), or the connection carries bytes (`pump`): torch's
store, at which ranks meet, has no secret of its own, so it listens on loopback alone, and the ranks
of other nodes reach it through such connections.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import psutil
from pydantic import BaseModel

from tandem.errors import WorkerStartFailed, describe
from tandem.telemetry import Log
from trainer_service.service.deaths import Death

_HANDSHAKE_SECONDS = 5.0
_MOST_STRANGERS = 64
"""Connections that have not proved anything yet, at once; more are closed unheard."""
_MOST_HELLO_BYTES = 1024
_MOST_MESSAGE_BYTES = 2**20
_RETRY_SECONDS = 0.2
_LOG_SECONDS = 10.0
"""Between two log lines on strangers."""


class ConnectionLost(Exception):
    """The other side is gone, or was not heard of for too long, as the sentence says."""


class Hello(BaseModel):
    """What a node says of itself. `store`: the connection is to carry that of a rank, and nothing
    else counts. `store_port` is where the node's ranks find the store, on its loopback;
    `interface` is the one by which it came."""

    node: int
    store: bool = False
    nodes: int = 0
    ranks: int = 0
    store_port: int = 0
    interface: str = ""
    nonce: str = ""


class Message(BaseModel):
    """`alive` says nothing else. Node 0 sends `assign`, the assignment of a `rank`, and `end`, why
    the worker ends ("": as it should); the others send `death`, that of one of their ranks, and
    `end`, why the node does."""

    kind: Literal["alive", "assign", "end", "death"]
    rank: int = 0
    text: str = ""
    death: Death | None = None


class Peer:
    """Messages with another node, both ways, and a sign of life whenever there is nothing to say.

    After `patience` seconds without a word the other side counts as gone: its host may have
    stopped, or the network. `name` is what it is called then.
    """

    def __init__(self, connection: socket.socket, *, name: str, patience: float) -> None:
        connection.settimeout(patience)
        self._connection = connection
        self._name = name
        self._patience = patience
        self._sign_of_life = patience / 5
        self._lines = _Lines(connection, most=_MOST_MESSAGE_BYTES)
        self._sending = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._say_alive, name=f"alive-{name}", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message, unless the other side is gone: who receives finds out."""
        with suppress(OSError), self._sending:
            self._connection.sendall(message.model_dump_json().encode() + b"\n")

    def receive(self) -> Message:
        """Return the next message. Raises `ConnectionLost`."""
        while True:
            try:
                message = Message.model_validate_json(self._lines.read())
            except TimeoutError:
                raise ConnectionLost(
                    f"{self._name} was not heard of for {self._patience:g} s: its host or the "
                    "network between is down, or its processes are stopped"
                ) from None
            except (OSError, EOFError):
                raise ConnectionLost(f"{self._name} is gone: its connection was closed") from None
            if message.kind != "alive":
                return message

    def be_patient(self, seconds: float) -> None:
        """Wait so long for a word from now on."""
        self._patience = seconds
        self._connection.settimeout(seconds)

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _say_alive(self) -> None:
        while not self._closed.wait(self._sign_of_life):
            self.send(Message(kind="alive"))


class Listener:
    """Node 0's port. `on_node` gets every connection that proved the secret, in a thread of its
    own, with what it said of itself."""

    def __init__(
        self,
        *,
        port: int,
        secret: str,
        on_node: Callable[[socket.socket, Hello], None],
        log: Log,
    ) -> None:
        self._key = _key(secret)
        self._on_node = on_node
        self._strangers = threading.Semaphore(_MOST_STRANGERS)
        self._closed = threading.Event()
        self._logged = -_LOG_SECONDS
        self._log = log
        both = socket.has_dualstack_ipv6()
        try:
            self._socket = socket.create_server(
                ("", port),
                family=socket.AF_INET6 if both else socket.AF_INET,
                backlog=_MOST_STRANGERS,
                dualstack_ipv6=both,
            )
        except OSError as error:
            raise WorkerStartFailed(
                f"node 0 cannot listen on port {port}, where the other nodes are to find it: "
                f"{error.strerror}"
            ) from error
        threading.Thread(target=self._accept, name="rendezvous", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._socket.accept()
            except OSError:  # it was closed; or no more files may be open, or a stranger broke off
                self._closed.wait(_RETRY_SECONDS)
                continue
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(
                target=self._greet, args=(connection, address[0]), name="greet", daemon=True
            ).start()

    def _greet(self, connection: socket.socket, address: str) -> None:
        try:
            hello = _admit(connection, self._key)
        except (OSError, EOFError, ValueError) as error:
            connection.close()
            if time.monotonic() - self._logged >= _LOG_SECONDS:
                self._logged = time.monotonic()
                self._log.warning("stranger_refused", address=address, reason=describe(error))
            return
        finally:
            self._strangers.release()
        self._on_node(connection, hello)


def join(host: str, port: int, hello: Hello, *, secret: str, until: float) -> socket.socket:
    """Connect to node 0, which may not be there yet, and prove the secret to each other. Raises
    `WorkerStartFailed` if that has not succeeded by `until`, of the monotonic clock."""
    while True:
        try:
            return _introduce(host, port, hello, _key(secret))
        except (OSError, EOFError, ValueError) as error:
            if time.monotonic() + _RETRY_SECONDS > until:
                raise WorkerStartFailed(
                    f"node {hello.node} did not reach node 0 at {host}:{port} in time: "
                    f"{describe(error)}"
                ) from error
        time.sleep(_RETRY_SECONDS)


def pump(one: socket.socket, other: socket.socket) -> None:
    """Carry bytes both ways until either side is closed; then close both."""
    for each in (one, other):
        each.settimeout(None)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    back = threading.Thread(target=_carry, args=(other, one), name="pump", daemon=True)
    back.start()
    _carry(one, other)
    back.join()
    one.close()
    other.close()


def interface_of(connection: socket.socket) -> str:
    """Return the name of the network interface that a connection goes through."""
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


def _admit(connection: socket.socket, key: bytes) -> Hello:
    """Node 0's side of the handshake."""
    until = time.monotonic() + _HANDSHAKE_SECONDS
    challenge = secrets.token_hex(32).encode()
    connection.settimeout(_HANDSHAKE_SECONDS)
    connection.sendall(challenge + b"\n")
    lines = _Lines(connection, most=_MOST_HELLO_BYTES, until=until)
    said, proof = lines.read(), lines.read()
    if not hmac.compare_digest(proof, _proof(key, b"node", challenge, said)):
        raise ValueError("it does not know the secret")
    connection.sendall(_proof(key, b"node 0", challenge, said) + b"\n")
    return Hello.model_validate_json(said)


def _introduce(host: str, port: int, hello: Hello, key: bytes) -> socket.socket:
    """The other side of it."""
    connection = socket.create_connection((host, port), timeout=_HANDSHAKE_SECONDS)
    try:
        lines = _Lines(
            connection, most=_MOST_HELLO_BYTES, until=time.monotonic() + _HANDSHAKE_SECONDS
        )
        challenge = lines.read()
        update = {"nonce": secrets.token_hex(32)}
        if not hello.store:
            update["interface"] = hello.interface or interface_of(connection)
        said = hello.model_copy(update=update).model_dump_json().encode()
        connection.sendall(said + b"\n" + _proof(key, b"node", challenge, said) + b"\n")
        try:
            proof = lines.read()
        except EOFError:
            raise ValueError("it refuses the proof of the secret, so it has another") from None
        if not hmac.compare_digest(proof, _proof(key, b"node 0", challenge, said)):
            raise ValueError("what listens there does not know the secret")
    except BaseException:
        connection.close()
        raise
    return connection


def _key(secret: str) -> bytes:
    """Not the secret itself, which the calls of the gateway carry."""
    return hmac.digest(secret.encode(), b"tandem nodes of a trainer", "sha256")


def _proof(key: bytes, side: bytes, challenge: bytes, said: bytes) -> bytes:
    content = b"\n".join((side, challenge, said))
    return hmac.new(key, content, hashlib.sha256).hexdigest().encode()


class _Lines:
    """The lines that come by a connection, of `most` bytes each. Those of a handshake come `until`
    a time, and not a byte beyond them is read, which is for somebody else."""

    def __init__(self, connection: socket.socket, *, most: int, until: float = 0.0) -> None:
        self._connection = connection
        self._most = most
        self._until = until
        self._rest = b""

    def read(self) -> bytes:
        """Return the next line. Raises `EOFError`, `TimeoutError`, or `ValueError` for a line that
        is too long."""
        while b"\n" not in self._rest:
            if len(self._rest) > self._most:
                raise ValueError("it sends a line that is too long")
            if self._until:
                if (left := self._until - time.monotonic()) <= 0:
                    raise TimeoutError("it did not answer in time")
                self._connection.settimeout(left)
            part = self._connection.recv(1 if self._until else 65536)
            if not part:
                raise EOFError("it closed the connection")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def _carry(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while part := source.recv(65536):
            target.sendall(part)
    for each, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with suppress(OSError):
            each.shutdown(how)
