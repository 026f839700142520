"""A gateway that is asked to stop."""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest

from gateway.app import create_app, make_server
from gateway.workers.processes import Processes
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.running import no_signals, running_gateway, settings_for
from tests.support.waiting import PATIENCE, until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_that_comes_before_the_gateway_serves_ends_it(tmp_path, number):
    settings = settings_for(tmp_path)
    server = make_server(create_app(settings, launcher=FakeLauncher()), settings)
    server.capture_signals = no_signals
    server.handle_exit(number, None)
    await asyncio.wait_for(server.serve(), PATIENCE)
    assert not (settings.data_dir / "gateway.json").exists()


async def test_a_signal_ends_a_gateway_before_the_next_tick(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.app._TICK", 1e6)
    settings = settings_for(tmp_path)
    server = make_server(create_app(settings, launcher=FakeLauncher()), settings)
    server.capture_signals = no_signals
    serving = asyncio.create_task(server.serve())
    await until(lambda: (settings.data_dir / "gateway.json").exists())
    server.handle_exit(signal.SIGTERM, None)
    await asyncio.wait_for(serving, PATIENCE)
    assert not (settings.data_dir / "gateway.json").exists()


def test_a_client_that_goes_on_asking_loses_no_request_to_a_stop(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.app._LAST_REQUESTS", PATIENCE)
    with running_gateway(tmp_path) as gateway, gateway.http() as client:
        assert client.get("/api/v1/healthz").headers.get("connection") != "close"
        gateway.server.should_exit = True
        while client.get("/api/v1/healthz").headers.get("connection") != "close":
            pass  # the connection stays open for the next request
        with pytest.raises(httpx.ConnectError):
            client.get("/api/v1/healthz")


async def test_a_gateway_that_cannot_start_leaves_the_workers_to_the_next_one(
    tmp_path, monkeypatch
):
    def fail(self):
        raise OSError("the disk is away")

    monkeypatch.setattr("gateway.owners.sessions.registry.SessionRegistry.read_sessions", fail)
    left: list[bool] = []

    async def close(self, *, leaving: bool) -> None:
        left.append(leaving)

    monkeypatch.setattr(Processes, "close", close)
    app = create_app(settings_for(tmp_path), launcher=FakeLauncher())
    with pytest.raises(OSError, match="the disk is away"):
        async with app.router.lifespan_context(app):
            pass
    assert left == [True]
