"""Stalled connections, seen from raw sockets."""

from __future__ import annotations

import contextlib
import json

import pytest
import zstandard

from tests.support.gateway.raw_connection import Raw
from tests.support.gateway.requests import optim_step
from tests.support.gateway.running import forward_backward_bytes, running_gateway
from tests.support.waiting import PATIENCE, wait_until

LIMIT = 300_000
HTTP = {
    "header_timeout": 0.3,
    "body_gap_timeout": 0.3,
    "body_timeout": 0.9,
    "linger": 0.4,
    "max_header_bytes": 4096,
}


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with running_gateway(
        tmp_path_factory.mktemp("timeouts"),
        session_ttl=600,
        max_payload_bytes=LIMIT,
        http=HTTP,
    ) as gate:
        yield gate


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    """A gateway with long timeouts."""
    with running_gateway(
        tmp_path_factory.mktemp("patient"),
        session_ttl=600,
        max_payload_bytes=LIMIT,
        http={"linger": 0.4, "keep_alive": 2},
        limit={"body_bytes": 500_000},
    ) as gate:
        yield gate


def timeouts(gate, what: str) -> float:
    return gate.gateway.metrics.timeouts.labels(what=what)._value.get()


def refusals(gate, limit: str) -> float:
    return gate.gateway.metrics.refusals.labels(limit=limit)._value.get()


# --- Headers ------------------------------------------------------------------------------


def test_headers_that_never_end_are_408_and_the_connection_is_closed(gate):
    before = timeouts(gate, "header")
    with Raw(gate) as raw:
        raw.send(b"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        status, headers, body = raw.answer()
        assert (status, body["type"]) == (408, "request_timed_out")
        assert headers["connection"] == "close"
        assert "the headers of the request did not arrive within" in body["error"]
        assert raw.rest() == b""
    assert timeouts(gate, "header") == before + 1


@pytest.mark.parametrize("data", [b"", b"\r\n\r\n\r\n"])
def test_a_connection_that_asks_for_nothing_is_closed(gate, data):
    with Raw(gate) as raw:
        raw.send(data)
        assert raw.rest() == b""


def test_a_trickle_of_headers_does_not_move_the_deadline(gate):
    with Raw(gate) as raw:
        raw.send(b"GET /api/v1/healthz HTTP/1.1\r\n")
        raw.socket.settimeout(0.05)
        seen = b""
        for n in range(200):
            with contextlib.suppress(ConnectionError):  # a slow client may find it closed
                raw.send(b"X-%d: y\r\n" % n)
            try:
                seen = raw.socket.recv(100)
                break
            except TimeoutError:
                continue
        assert seen.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("lines", [1, 400])
def test_headers_beyond_their_bound_are_431(patient, lines):
    before = refusals(patient, "header_bytes")
    with Raw(patient) as raw:
        raw.send(b"GET /api/v1/healthz HTTP/1.1\r\n")
        raw.send(b"X-Long: %s\r\n" % (b"y" * (100_000 // lines)) * lines)
        raw.send(b"\r\n")
        status, _, body = raw.answer()
        assert (status, body["type"]) == (431, "invalid_request")
    assert refusals(patient, "header_bytes") == before + 1


@pytest.mark.parametrize("begun", ["X-Long: ", "X-"])
def test_a_header_that_never_ends_is_431(patient, begun):
    with Raw(patient) as raw:
        raw.send(f"GET /api/v1/healthz HTTP/1.1\r\n{begun}".encode())
        for _ in range(16):
            with contextlib.suppress(ConnectionError):
                raw.send(b"y" * 2**20)
        status, _, body = raw.answer()
        assert (status, body["type"]) == (431, "invalid_request")


@pytest.mark.parametrize("rest", [b"0\r\nX-Long: " + b"y" * 2**17, b"no chunk\r\n"])
def test_a_request_that_was_refused_gets_no_second_answer(patient, rest):
    with Raw(patient) as raw:
        raw.send(b"POST /api/v1/session_heartbeat HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert raw.answer()[0] == 401
        raw.send(rest)
        assert raw.rest() == b""


def test_a_trailer_that_never_ends_closes_the_connection(patient):
    before = refusals(patient, "header_bytes")
    with Raw(patient) as raw:
        raw.post("/api/v1/session_heartbeat", "Transfer-Encoding: chunked")
        raw.send(b"0\r\nX-Long: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(16):
                raw.send(b"y" * 2**20)
        assert raw.rest() == b""
    assert refusals(patient, "header_bytes") == before + 1


def test_an_idle_connection_is_closed_and_a_used_one_goes_on(patient):
    with Raw(patient) as raw:
        for _ in range(2):
            raw.send(b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert raw.answer()[0] == 200
        assert raw.rest() == b""


# --- Bodies -------------------------------------------------------------------------------


def test_a_body_that_stops_is_408_with_a_sentence(gate):
    before = timeouts(gate, "body")
    with Raw(gate) as raw:
        raw.post("/api/v1/create_session", "Content-Length: 1000")
        raw.send(b'{"tags":')
        status, headers, body = raw.answer()
        assert (status, body["type"], body["category"]) == (408, "request_timed_out", "server")
        assert headers["connection"] == "close"
        assert raw.rest() == b""
    assert timeouts(gate, "body") == before + 1
    wait_until(lambda: gate.gateway.limits.bodies.total == 0)


def test_a_body_that_trickles_for_ever_ends_at_the_deadline_of_the_whole(gate):
    with Raw(gate) as raw:
        raw.post("/api/v1/create_session", "Transfer-Encoding: chunked")
        raw.socket.settimeout(0.05)
        seen = b""
        for _ in range(200):
            with contextlib.suppress(ConnectionError):  # as above
                raw.send(b"1\r\n \r\n")
            try:
                seen = raw.socket.recv(100)
                break
            except TimeoutError:
                continue
        assert seen.startswith(b"HTTP/1.1 408 ")


def test_a_body_is_refused_by_its_length_before_it_is_sent_and_takes_its_place(patient):
    run_id = patient.run_id(patient.session_id())
    with Raw(patient) as raw:
        raw.post("/api/v1/forward_backward", f"Content-Length: {LIMIT * 1000}")
        prefix = forward_backward_bytes(run_id, 1)
        raw.send(prefix + bytes(5000 - len(prefix)))  # of 300 MB
        status, _, body = raw.answer()
        assert (status, body["type"]) == (413, "payload_too_large")
        assert str(LIMIT * 1000) in body["error"]
        assert raw.rest() == b""  # nobody waits for the rest
    assert patient.retrieve(f"{run_id}:1").json()["type"] == "payload_too_large"
    wait_until(lambda: patient.gateway.limits.bodies.total == 0)


def test_a_slow_body_is_a_timeout_for_an_openai_client_too(gate):
    with Raw(gate) as raw:
        raw.post("/v1/completions", "Content-Length: 100")
        status, headers, body = raw.answer()
    assert (status, body["error"]["code"]) == (408, "request_timed_out")
    assert headers["connection"] == "close"


def test_a_client_that_sends_all_of_a_refused_body_still_reads_the_answer(tmp_path):
    bounds = {"max_payload_bytes": LIMIT, "http": {"linger": PATIENCE}}
    with running_gateway(tmp_path, **bounds) as gate, gate.http() as client:
        run_id = gate.run_id(gate.session_id())
        body = forward_backward_bytes(run_id, 1) + bytes(20 * LIMIT)
        answer = client.post("/api/v1/forward_backward", content=body)
        assert answer.status_code == 413
        chunked = client.post("/api/v1/forward_backward", content=iter([body[:100_000]] * 40))
        assert chunked.status_code == 413
        assert client.get("/api/v1/healthz").status_code == 200


def test_a_small_operation_that_is_too_large_takes_its_place_and_is_not_kept(tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        run_id = gate.run_id(gate.session_id())
        assert optim_step(client, run_id, 1, more="x" * 2**20).status_code == 200
        optim_step(client, run_id, 2)
        assert gate.retrieve(f"{run_id}:1").json()["type"] == "payload_too_large"
        assert gate.retrieve(f"{run_id}:2").json()["type"] == "optim_step"
        new = {"session_id": run_id.split(":")[0], "model_seq_id": 1, "base_model": "tiny"}
        new["user_metadata"] = {"more": "x" * 2**20}
        assert client.post("/api/v1/create_model", json=new).status_code == 413


def test_the_rest_of_a_refused_body_is_not_kept(patient):
    """It arrives while the connection lingers."""
    with Raw(patient) as raw:
        protocol = raw.protocol_in(patient)
        raw.post("/api/v1/create_session", f"Content-Length: {LIMIT * 1000}")
        raw.send(bytes(5000))
        assert raw.answer()[0] == 413
        with contextlib.suppress(ConnectionError):  # a slow machine sends after that
            raw.send(bytes(2_000_000))
        assert raw.rest() == b""
        assert len(protocol.cycle.body) == 0


def test_a_frame_that_asks_for_a_huge_window_is_refused(patient):
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    chunker = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = chunker.compress(b"{}") + chunker.flush()
    with patient.http() as client:
        answer = client.post(
            "/api/v1/create_session", content=frame, headers={"Content-Encoding": "zstd"}
        )
    assert (answer.status_code, answer.json()["type"]) == (400, "malformed_payload")


def test_bodies_on_their_way_take_a_bounded_memory_of_each_owner(patient):
    with Raw(patient) as first, Raw(patient) as second:
        first.post("/api/v1/create_session", "Content-Length: 290000")
        first.send(b'{"tags":[],"sdk_version":"x"')
        wait_until(lambda: patient.gateway.limits.bodies.total == 290_000)
        second.post("/api/v1/create_session", "Content-Length: 290000")
        status, headers, body = second.answer()
        assert (status, body["limit"]) == (429, "body_bytes")
        assert 1 <= int(headers["retry-after"]) <= 10
        first.send(b"}".rjust(290_000 - 28))
        assert first.answer()[0] == 200, "it was not refused, and is whole now"
    wait_until(lambda: patient.gateway.limits.bodies.total == 0)


# --- Clients that go away, and too many clients -------------------------------------------


def test_a_client_that_goes_away_in_the_middle_leaves_nothing(patient):
    run_id, limits = patient.run_id(patient.session_id()), patient.gateway.limits
    with Raw(patient) as raw:
        raw.post("/api/v1/forward_backward", "Content-Length: 200000")
        raw.send(forward_backward_bytes(run_id, 1))
        wait_until(lambda: limits.bodies.total == 200_000)
    wait_until(lambda: limits.bodies.total == 0)
    wait_until(lambda: limits.requests.total == 0)
    assert patient.gateway.runs.get(run_id).dispatcher.queued == 0


def test_while_arriving_bodies_use_all_their_memory_heartbeats_are_answered(patient):
    session_id, bodies = patient.session_id(), patient.gateway.limits.bodies
    with Raw(patient) as one, Raw(patient) as other, patient.http() as client:
        one.post("/api/v1/forward_backward", "Content-Length: 300000")
        wait_until(lambda: bodies.total == 300_000)
        other.post("/api/v1/forward_backward", "Content-Length: 200000")
        wait_until(lambda: bodies.total == 500_000)
        beat = client.post("/api/v1/session_heartbeat", json={"session_id": session_id})
        assert beat.status_code == 200, "without it, the session would end"
        refused = client.post("/api/v1/create_session", json={"tags": ["x" * 100] * 50})
        assert (refused.status_code, refused.json()["limit"]) == (429, "body_bytes")
    wait_until(lambda: bodies.total == 0)


def test_open_requests_of_an_owner_are_bounded(tmp_path):
    with running_gateway(tmp_path, session_ttl=600, long_poll=20, limit={"requests": 2}) as gate:
        session_id = gate.session_id()
        run_id = gate.run_id(session_id)
        _, trainer = gate.worker("trainer")
        gate.run(trainer.gate.clear)
        with gate.http() as client:
            optim_step(client, run_id, 1)
        wait_until(lambda: gate.gateway.limits.requests.total == 0)
        asked = json.dumps({"request_id": f"{run_id}:1"}).encode()
        polls = [Raw(gate) for _ in range(2)]
        for poll in polls:
            poll.post("/api/v1/retrieve_future", f"Content-Length: {len(asked)}")
            poll.send(asked)
        wait_until(lambda: gate.gateway.limits.requests.total == 2)
        with gate.http() as client:
            refused = client.get("/api/v1/sessions")
            assert client.get("/api/v1/readyz").status_code == 200
            beat = client.post("/api/v1/session_heartbeat", json={"session_id": session_id})
            assert beat.status_code == 200, "without it, the session would end"
        assert (refused.status_code, refused.json()["limit"]) == (429, "requests")
        gate.run(trainer.gate.set)
        assert [poll.answer()[0] for poll in polls] == [200, 200]
        for poll in polls:
            poll.socket.close()
