"""Logs of real processes while a disk is full."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

_FILLS_ITS_DISK = """
import resource, signal, sys
from tandem.telemetry import configure_logging, get_log
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
configure_logging(service="gateway")
log = get_log()
log.info("first")
size = sys.stderr.buffer.seek(0, 2) if sys.stderr.seekable() else 0
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, unlimited[1]))
for number in range(3):
    log.info("cut", number=number)
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
for number in range(2):
    log.info("whole", number=number)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_that_a_full_disk_has_cut_does_not_spoil_the_next(tmp_path, unbuffered):
    path = tmp_path / "gateway.log"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with path.open("ab") as log:
        subprocess.run(
            [sys.executable, "-c", _FILLS_ITS_DISK], stderr=log, env=environment, check=True
        )
    first, cut, *others = path.read_text().splitlines()
    assert json.loads(first)["event"] == "first"
    assert len(cut) == 50, "of a line that had room for so much"
    assert [json.loads(line)["event"] for line in others] == ["whole", "whole"]
