from __future__ import annotations

import os

from tests.support.gateway.running import running_gateway
from tests.support.waiting import wait_until


def test_the_gateway_rotates_large_logs_and_removes_old_ones(tmp_path):
    folder = tmp_path / "data" / "logs"
    folder.mkdir(parents=True)
    (folder / "gateway.log").write_text("the first line\n" + "x" * 5000 + "\n")
    old = folder / "trainer-s-1-0.log"
    old.write_text("x\n")
    os.utime(old, (1_000_000_000, 1_000_000_000))
    with running_gateway(tmp_path, session_ttl=600, log_max_bytes=4096, log_ttl=60.0) as gate:
        assert gate.settings.data_dir / "logs" == folder
        wait_until(lambda: not old.exists())  # the first round's last work on logs
        assert (folder / "gateway.log").read_text() == "the first line\n"
        assert "x" * 5000 in (folder / "gateway.log.1").read_text()
