"""Many open connections lock nobody out."""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import weakref
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from gateway.api import http_connection
from gateway.api.http_connection import Starts
from tests.support.gateway.raw_connection import Raw
from tests.support.gateway.requests import optim_step
from tests.support.gateway.running import KEY, running_gateway
from tests.support.waiting import wait_until

MOST = 8192
HEALTH = ("healthz", "readyz")

_OPENS_CONNECTIONS = """
import resource, socket, sys
host, port, many, addresses = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
held = []
for number in range(many):
    source = (f"127.0.1.{1 + number % addresses}", 0)
    held.append(socket.create_connection((host, port), timeout=60, source_address=source))
print("open", flush=True)
sys.stdin.read()
"""


@contextmanager
def foreign_connections(gate, many: int, *, addresses: int):
    """Another process opens connections and sends nothing."""
    host, port = gate.url.removeprefix("http://").split(":")
    command = [sys.executable, "-c", _OPENS_CONNECTIONS, host, port, str(many), str(addresses)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"open\n"
            yield
        finally:
            process.kill()


def beat(client: httpx.Client, session_id: str) -> int:
    return client.post("/api/v1/session_heartbeat", json={"session_id": session_id}).status_code


@pytest.mark.parametrize("addresses", [1, 64])
def test_as_many_foreign_connections_as_are_allowed_lock_nobody_out(tmp_path, addresses):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * MOST:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as known:
            session_id = gate.session_id()
            assert beat(known, session_id) == 200
            with foreign_connections(gate, MOST, addresses=addresses):
                assert beat(known, session_id) == 200
                with gate.http() as another:
                    assert beat(another, session_id) == 200
                    assert another.get("/api/v1/sessions").status_code == 200
                for path in HEALTH:
                    assert httpx.get(f"{gate.url}/api/v1/{path}", timeout=60).status_code == 200
                assert len(gate.server.server_state.connections) <= MOST
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_new_connection_takes_the_place_of_one_that_never_brought_a_request(tmp_path):
    with (
        running_gateway(tmp_path, session_ttl=600, http={"max_connections": 4}) as gate,
        foreign_connections(gate, 16, addresses=16),
        gate.http() as client,
    ):
        wait_until(lambda: len(gate.server.server_state.connections) == 4)
        for _ in range(3):
            assert client.get("/api/v1/sessions").status_code == 200


def test_idle_connections_of_known_clients_give_way_too(tmp_path):
    with (
        running_gateway(tmp_path, session_ttl=600, http={"max_connections": 4}) as gate,
        ExitStack() as stack,
    ):
        for _ in range(12):
            client = stack.enter_context(gate.http())
            assert client.get("/api/v1/sessions").status_code == 200
        wait_until(lambda: len(gate.server.server_state.connections) <= 4)
        assert client.get("/api/v1/sessions").status_code == 200


def test_while_all_connections_have_requests_health_and_heartbeats_are_answered(tmp_path):
    with (
        running_gateway(
            tmp_path, session_ttl=600, long_poll=30, http={"max_connections": 3}
        ) as gate,
        ExitStack() as stack,
    ):
        session_id = gate.session_id()
        run_id = gate.run_id(session_id)
        _, trainer = gate.worker("trainer")
        gate.run(trainer.gate.clear)
        with gate.http() as client:
            optim_step(client, run_id, 1)
        # The connection of an earlier request may still be open and counted.
        wait_until(lambda: not gate.server.server_state.connections, what="no connection is open")
        asked = json.dumps({"request_id": f"{run_id}:1"}).encode()
        for number in range(3):
            poll = stack.enter_context(Raw(gate))
            poll.post("/api/v1/retrieve_future", f"Content-Length: {len(asked)}")
            poll.send(asked)
            wait_until(
                lambda n=number: gate.gateway.limits.requests.total == n + 1,
                what=f"{number + 1} requests are open",
            )
        for _ in range(2):
            with Raw(gate) as one_more:
                one_more.send(f"GET /api/v1/sessions HTTP/1.1\r\nX-API-Key: {KEY}\r\n\r\n".encode())
                status, headers, body = one_more.answer()
                assert (status, body["type"], headers["retry-after"]) == (429, "overloaded", "1")
            for path in HEALTH:
                assert httpx.get(f"{gate.url}/api/v1/{path}", timeout=60).status_code == 200
            with gate.http() as client:
                assert beat(client, session_id) == 200
        gate.run(trainer.gate.set)


def test_a_closed_connection_leaves_the_memory_without_a_garbage_collection(tmp_path):
    with running_gateway(tmp_path) as gate:
        gc.disable()
        try:
            with gate.http() as client:
                assert client.get("/api/v1/sessions").status_code == 200
                left = weakref.WeakSet(gate.server.server_state.connections)
                assert left
            wait_until(lambda: not left)
        finally:
            gc.enable()


def test_health_and_heartbeats_do_not_wait_behind_a_burst(tmp_path, monkeypatch):
    queues, begin = [], Starts.begin_request

    def noted(starts, cycle, start) -> None:
        queues.append(starts)
        begin(starts, cycle, start)

    monkeypatch.setattr(Starts, "begin_request", noted)
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        session_id = gate.session_id()
        with monkeypatch.context() as patch, Raw(gate) as ordinary:
            patch.setattr(http_connection, "STARTS", 0)
            assert client.get("/api/v1/healthz").status_code == 200  # no turn after it has room
            ordinary.send(f"GET /api/v1/sessions HTTP/1.1\r\nX-API-Key: {KEY}\r\n\r\n".encode())
            wait_until(lambda: queues[0]._waiting)
            for path in HEALTH:
                assert client.get(f"/api/v1/{path}").status_code == 200
            assert beat(client, session_id) == 200
            assert queues[0]._waiting
            patch.undo()
            assert client.get("/api/v1/healthz").status_code == 200
            assert ordinary.answer()[0] == 200
