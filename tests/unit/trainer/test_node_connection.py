from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest

from trainer_service.service.node_connection import ConnectionLost, Hello, Message, Peer

SECONDS = 60.0
HELLO = Hello(worker_id="trainer-1", node=1, nodes=2, ranks=4, interface="lo")


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_messages_come_in_order_without_the_signs_of_life_between(ends):
    sender, receiver = (Peer(each, name="node 1", patience=SECONDS) for each in ends)
    sent = [
        Message(kind="hello", hello=HELLO),
        Message(kind="assign", rank=3, text="x" * 200_000),
        Message(kind="end", text="it was stopped"),
    ]

    def send() -> None:
        for message in sent:
            sender.send(Message(kind="alive"))
            sender.send(message)

    thread = threading.Thread(target=send)
    thread.start()
    assert [receiver.receive() for _ in sent] == sent
    thread.join(SECONDS)


def test_a_silent_node_is_lost_after_the_patience_of_the_receiver(ends):
    receiver = Peer(ends[0], name="node 1", patience=SECONDS)
    with pytest.raises(ConnectionLost, match=r"node 1 was not heard of for 0\.05 s"):
        receiver.receive(within=0.05)


def test_a_node_that_closes_its_connection_is_lost(ends):
    receiver = Peer(ends[0], name="node 1", patience=SECONDS)
    ends[1].close()
    with pytest.raises(ConnectionLost, match="node 1 is gone: its connection was closed"):
        receiver.receive()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x00\xff\n",
        b'{"kind": "hello", "hello": {"node": 0}}\n',
        b"x" * 2**21,
    ],
    ids=["http", "tls", "no hello", "endless"],
)
def test_a_stranger_is_refused_by_its_first_message(ends, said):
    receiver = Peer(ends[0], name="198.51.100.7", patience=SECONDS)

    def send() -> None:
        with suppress(OSError):  # the receiver does not read to the end
            ends[1].sendall(said)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(ConnectionLost, match=r"198\.51\.100\.7 is no node"):
        receiver.receive()
    receiver.close()
    thread.join(SECONDS)
