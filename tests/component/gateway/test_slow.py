"""Slow clients hold one piece of their answer for a limited time."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import pytest

from gateway.api.errors import ErrorResponses
from gateway.api.middleware import RequestBoundary
from gateway.workers.clients import TrainerClient
from tandem.v1 import trainer_pb2
from tandem.wire.v1 import tinker_pb2
from tests.support.gateway.running import KEY, forward_backward_bytes, running_gateway
from tests.support.waiting import wait_until

PROTO = {"Content-Type": "application/x-protobuf"}
TOKENS = 1_500_000
"""Logprobs of these tokens (6 MB) exceed the kernel's buffers."""


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with running_gateway(
        tmp_path_factory.mktemp("slow"), session_ttl=600, http={"write_timeout": 1}
    ) as gate:
        yield gate


@pytest.fixture(scope="module")
def result(gate):
    return large_result(gate)


def large_result(gate) -> tuple[str, bytes]:
    """A request_id and the result's bytes."""
    run_id = gate.run_id(gate.session_id())

    async def large(_client, _method, _request, *, begun):
        output = tinker_pb2.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        output.loss_fn_outputs.add().fields["logprobs"].data = bytes(4 * TOKENS)
        return trainer_pb2.ForwardBackwardReply(output=output.SerializeToString())

    with pytest.MonkeyPatch.context() as patched, gate.http() as client:
        patched.setattr(TrainerClient, "call", large)
        client.post(
            "/api/v1/forward_backward", content=forward_backward_bytes(run_id, 1), headers=PROTO
        )
        content = wait_until(lambda: whole(gate, f"{run_id}:1"))
    assert len(content) > 4 * TOKENS
    return f"{run_id}:1", content


def whole(gate, request_id: str) -> bytes:
    """The result, or nothing if this machine reads too slowly."""
    try:
        return gate.retrieve(request_id).content
    except httpx.TransportError:
        return b""


def ask(gate, request_id: str) -> socket.socket:
    """Asks for a result, and reads nothing."""
    host, port = gate.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    client.connect((host, int(port)))
    body = json.dumps({"request_id": request_id}).encode()
    client.sendall(
        f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return client


def received(client: socket.socket) -> bytes:
    data = b""
    try:
        while piece := client.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


@pytest.mark.parametrize("where", ["memory", "file"])
def test_a_client_that_takes_nothing_is_cut_off_and_the_result_stays(gate, result, where):
    request_id, content = result
    if where == "file":
        gate.run(lambda: gate.gateway.futures._drop(gate.gateway.futures.get(request_id)))
    cut = gate.gateway.metrics.timeouts.labels(what="write")
    before = cut._value.get()
    client = ask(gate, request_id)
    wait_until(lambda: cut._value.get() == before + 1)
    wait_until(lambda: gate.gateway.limits.requests.total == 0)
    assert len(received(client)) < len(content)
    client.close()
    wait_until(lambda: whole(gate, request_id) == content)


def test_a_gateway_that_stops_cuts_off_a_client_that_takes_nothing_without_an_error(
    tmp_path, caplog
):
    patient = {"write_timeout": 60}  # the module's other gateway has 1
    with running_gateway(tmp_path, session_ttl=600, http=patient) as gate:
        request_id, _ = large_result(gate)
        client = ask(gate, request_id)
        wait_until(lambda: any(c.flow.write_paused for c in gate.server.server_state.connections))
        cut = gate.gateway.metrics.timeouts.labels(what="stop")
    assert cut._value.get() == 1
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]
    client.close()


def test_a_client_that_stands_still_holds_no_more_than_a_piece(gate, result):
    request_id, _ = result
    client = ask(gate, request_id)

    def buffered() -> list[int]:
        return [
            c.transport.get_write_buffer_size()
            for c in gate.server.server_state.connections
            if c.flow.write_paused
        ]

    assert max(wait_until(lambda: gate.run(buffered))) <= 256 * 2**10 + 65536
    client.close()


def test_a_large_answer_is_handed_over_in_pieces_that_make_up_the_whole(gate):
    body = bytes(range(256)) * 5000

    async def app(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    sent: list[dict[str, object]] = []

    async def send(message):
        sent.append(message)

    opened = asyncio.Event()
    opened.set()
    boundary = RequestBoundary(
        app,
        settings=gate.gateway.settings,
        metrics=gate.gateway.metrics,
        errors=ErrorResponses({}),
        opened=opened,
        longest_wait=0.0,
    )
    scope = {"type": "http", "path": "/", "raw_path": b"/", "headers": [], "state": {}}
    asyncio.run(boundary(scope | {"app": gate.server.config.app}, None, send))
    pieces = sent[1:]
    assert b"".join(piece["body"] for piece in pieces) == body
    assert max(len(piece["body"]) for piece in pieces) == 256 * 2**10
    assert [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]
