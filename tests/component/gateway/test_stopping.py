"""How a gateway ends that is asked to."""

from __future__ import annotations

import asyncio
import signal

import pytest

from gateway.app import create_app, make_server
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.running import no_signals, settings_for
from tests.support.waiting import PATIENCE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_that_comes_before_the_gateway_serves_ends_it(tmp_path, number):
    settings = settings_for(tmp_path)
    server = make_server(create_app(settings, launcher=FakeLauncher()), settings)
    server.capture_signals = no_signals
    server.handle_exit(number, None)
    await asyncio.wait_for(server.serve(), PATIENCE)
    assert not (settings.data_dir / "gateway.json").exists()
