"""Foreign pages read nothing. Bad requests log a line a minute."""

from __future__ import annotations

import io
import json
import socket

import httpx
import pytest

from tandem.telemetry import configure_logging
from tests.support.gateway.running import running_gateway
from tests.support.telemetry import logging_restored

OPEN = ["/metrics", "/api/v1/healthz"]
SITES = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "Evil.Example.", "a@b", ""]
OWN = ["127.0.0.1", "localhost:8000", "LOCALHOST.", "[::1]:8000", "127.0.0.2", "gateway"]


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with running_gateway(tmp_path_factory.mktemp("hosts")) as gate:
        yield gate


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    url = "https://Tandem.example.org:8443/base"
    with running_gateway(tmp_path_factory.mktemp("public"), public_url=url) as gate:
        yield gate


def ask(gate, path: str, host: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{gate.url}{path}", headers={"Host": host, **headers}, timeout=30)


@pytest.mark.parametrize("host", SITES)
@pytest.mark.parametrize("path", [*OPEN, "/api/v1/sessions", "/v1/models", "/x"])
def test_a_request_by_the_name_of_a_site_is_refused(gate, path, host):
    answer = ask(gate, path, host)
    assert answer.status_code == 400, answer.text
    assert "TANDEM_PUBLIC_URL" in answer.text


@pytest.mark.parametrize("host", OWN)
def test_a_request_by_a_name_of_this_machine_is_answered(gate, host):
    assert {ask(gate, path, host).status_code for path in OPEN} == {200}


def raw(gate, request: bytes) -> bytes:
    host, port = gate.server.servers[0].sockets[0].getsockname()[:2]
    with socket.create_connection((host, port), timeout=30) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


def test_a_request_of_http_1_0_needs_no_host_and_none_has_two(gate):
    assert b" 200 " in raw(gate, b"GET /api/v1/healthz HTTP/1.0\r\n\r\n")
    two = b"GET /api/v1/healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n"
    assert b" 400 " in raw(gate, two)


def test_the_name_of_the_public_url_is_the_gateways(public):
    for host in ("tandem.example.org", "TANDEM.example.org:8443", "tandem.example.org.", *OWN):
        assert ask(public, "/api/v1/healthz", host).status_code == 200, host
    for host in ("example.org", "x.tandem.example.org", "evil.example"):
        assert ask(public, "/api/v1/healthz", host).status_code == 400, host


def test_metrics_by_a_public_name_need_a_key(public):
    assert ask(public, "/metrics", "tandem.example.org").status_code == 401
    key = {"X-API-Key": public.gateway.api_key}
    assert ask(public, "/metrics", "tandem.example.org", **key).status_code == 200


def test_malformed_requests_leave_one_line_a_minute_and_a_sentence(tmp_path):
    stream = io.StringIO()
    with logging_restored():
        configure_logging(service="gateway", level="info", stream=stream)
        with running_gateway(tmp_path) as gate:
            host = b"Host: localhost\r\nConnection: "
            for _ in range(20):
                answer = raw(gate, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["type"] == "malformed_payload"
                assert b" 400 " in raw(gate, b"GET / HTTP/9.9\r\n\r\n")
                upgrade = host + b"upgrade, close\r\nUpgrade: websocket\r\n\r\n"
                raw(gate, b"GET /api/v1/healthz HTTP/1.1\r\n" + upgrade)
        lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    said = [
        line
        for line in lines
        if line["level"] == "warning"
        and not line["event"].startswith("Session heartbeat failed")  # an earlier test's SDK client
    ]
    assert [line["event"] for line in said] == ["malformed_request", "malformed_requests"]
    assert said[1]["count"] == 59
    assert said[1]["reasons"] == {"not HTTP": 39, "upgrade": 20}
