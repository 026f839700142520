from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import logging
from tandem.telemetry import configure_logging, get_log, log_context

configure_logging(service="trainer")
with log_context(run_id="s-1:train:0"):
    get_log().info("published", step=3)
    try:
        raise OSError("no such thing")
    except OSError:
        get_log().exception("failed")
get_log().debug("unseen")
logging.getLogger("library").warning("old %s", "call")
logging.getLogger("library").info("unseen")
print("survived")
"""


def test_every_log_line_is_one_object_with_its_ids():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    published, failed, library = [json.loads(line) for line in done.stderr.splitlines()]
    assert published["event"] == "published"
    assert published["service"] == "trainer"
    assert published["run_id"] == "s-1:train:0"
    assert published["step"] == 3
    assert "OSError: no such thing" in failed["exception"]
    assert (library["event"], library["level"]) == ("old call", "warning")
    assert "run_id" not in library


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_costs_log_lines_and_nothing_else():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=full)
    assert done.stdout == b"survived\n"
