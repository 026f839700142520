"""Readers of a worker's metrics hold no thread and no memory."""

from __future__ import annotations

import contextlib
import socket
import threading

import httpx
import psutil
import pytest
from prometheus_client import CollectorRegistry, Counter

from tandem.protocol.metrics_server import MetricsServer
from tests.support.waiting import wait_until


def serving(*, deadline: float = 60.0, host: str = "127.0.0.1") -> int:
    registry = CollectorRegistry()
    Counter("tandem_tests", "Tests.", registry=registry).inc()
    return MetricsServer(registry, host=host, deadline=deadline).serve_metrics(port=0)


def ask(port: int, *, host: str = "127.0.0.1", method: str = "GET", path: str = "/metrics"):
    url = f"http://127.0.0.1:{port}{path}"
    return httpx.request(method, url, headers={"Host": host}, timeout=30)


def ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_metrics_are_served_in_both_formats():
    port = serving()
    assert "tandem_tests_total 1.0" in ask(port).text
    openmetrics = {"Accept": "application/openmetrics-text; version=1.0.0"}
    answer = httpx.get(f"http://127.0.0.1:{port}/metrics?x=1", headers=openmetrics, timeout=30)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    assert ask(port, method="HEAD").text == ""
    assert ask(port, method="POST").status_code == 405
    assert ask(port, path="/v1/models").status_code == 404


def test_slow_connections_hold_no_threads_and_end():
    port = serving(deadline=0.3)
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        slow = []
        for sent in [b"", b"GET ", b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: "] * 15:
            slow.append(socket.create_connection(("127.0.0.1", port)))
            stack.callback(slow[-1].close)
            slow[-1].sendall(sent)
        assert ask(port).is_success
        assert threading.active_count() <= threads
        wait_until(lambda: all(map(ended, slow)), what="the slow ones are ended")


def test_many_connections_keep_nobody_out():
    port = serving()
    with contextlib.ExitStack() as stack:
        held = []
        for _ in range(300):
            held.append(socket.create_connection(("127.0.0.1", port)))
            stack.callback(held[-1].close)
        assert ask(port).is_success
        wait_until(lambda: sum(map(ended, held)) >= 230, what="the oldest are ended")


def test_a_client_that_reads_nothing_is_ended():
    registry = CollectorRegistry()
    counter = Counter("tandem_tests", "Tests.", ["label"], registry=registry)
    for number in range(100_000):
        counter.labels(f"{number:0100}")
    port = MetricsServer(registry, host="127.0.0.1", deadline=2.0).serve_metrics(port=0)
    with socket.create_connection(("127.0.0.1", port)) as deaf:
        deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        mine = deaf.getsockname()[1]
        open_here = lambda: any(  # noqa: E731
            each.status == "ESTABLISHED" and each.laddr.port == port and each.raddr.port == mine
            for each in psutil.net_connections("tcp")
        )
        wait_until(lambda: not open_here(), what="the server has ended it")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "evil.example."])
def test_a_page_of_another_site_reads_no_metrics(host):
    answer = ask(serving(), host=host)
    assert answer.status_code == 421
    assert "tandem_tests" not in answer.text
    assert "/metrics" in answer.text


@pytest.mark.parametrize("host", ["localhost:1", "[::1]:9", "127.0.0.1", "LOCALHOST."])
def test_a_program_of_this_machine_reads_metrics(host):
    assert ask(serving(), host=host).is_success


def test_beyond_loopback_any_name_will_do_but_not_two():
    port = serving(host="0.0.0.0")
    assert ask(port, host="worker.example").is_success
    with socket.create_connection(("127.0.0.1", port), timeout=30) as twice:
        twice.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
        assert b" 421 " in twice.recv(100)


@pytest.mark.parametrize(
    "sent", [b"\0" * 100 + b"\r\n\r\n", b"x" * 100_000, b"GET\r\n\r\n", b"\xff\xfe\r\n\r\n"]
)
def test_what_is_no_request_is_ended_and_nobody_else_notices(sent):
    port = serving()
    odd = socket.create_connection(("127.0.0.1", port), timeout=30)
    with odd, contextlib.suppress(ConnectionError):
        odd.sendall(sent)
        while odd.recv(4096):
            pass
    assert ask(port).is_success
