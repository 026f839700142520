from __future__ import annotations

import pytest

from gateway.workers.launchers import make_launcher
from gateway.workers.launchers.process import ProcessLauncher
from tandem.errors import InvalidRequest
from tandem.settings import GatewaySettings


async def test_the_settings_name_the_launcher(monkeypatch, tmp_path):
    assert isinstance(make_launcher(GatewaySettings(data_dir=tmp_path)), ProcessLauncher)
    monkeypatch.setenv("TANDEM_LAUNCHER", "kubernetes")
    with pytest.raises(InvalidRequest, match=r"unknown TANDEM_LAUNCHER 'kubernetes'.* process"):
        make_launcher(GatewaySettings(data_dir=tmp_path))
