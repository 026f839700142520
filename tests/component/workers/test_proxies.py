"""Calls to this machine's servers, with a proxy that does not exist."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from tandem.protocol.channels import worker_channel
from tandem.protocol.own_machine import http_client
from tandem.protocol.worker import WorkerHandle

NOWHERE = "http://127.0.0.1:9"
LOWER = ["http_proxy", "https_proxy", "all_proxy", "grpc_proxy"]
NAMES = [*LOWER, *(name.upper() for name in LOWER)]


@pytest.fixture
def url():
    class Hello(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_about):
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hello)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("proxies", [*([name] for name in NAMES), NAMES])
@pytest.mark.parametrize("no_proxy", ["", "elsewhere.example"])
def test_an_http_request_to_this_machine_takes_no_proxy(url, monkeypatch, proxies, no_proxy):
    for name in proxies:
        monkeypatch.setenv(name, NOWHERE)
    monkeypatch.setenv("no_proxy", no_proxy)
    for own in (url, url.replace("127.0.0.1", "localhost")):
        with http_client(own) as client:
            assert client.get("healthz").status_code == 204


def test_a_proxy_of_a_kind_that_httpx_does_not_know_is_not_asked_for(url, monkeypatch):
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
    with pytest.raises((ImportError, ValueError, httpx.HTTPError)):
        httpx.get(url)
    with http_client(url) as client:
        assert client.get("healthz").status_code == 204


@pytest.mark.parametrize("proxies", [["grpc_proxy"], ["http_proxy"], NAMES])
async def test_a_grpc_call_to_a_worker_takes_no_proxy(monkeypatch, proxies):
    for name in proxies:
        monkeypatch.setenv(name, NOWHERE)
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    handle = WorkerHandle(
        worker_id="w",
        kind="trainer",
        session_id="s",
        run_id="r",
        model_name="m",
        model_path="m",
        max_lora_rank=0,
        address=f"127.0.0.1:{port}",
        metrics_port=0,
        secret="s",
    )
    try:
        async with worker_channel(handle) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await server.stop(None)
