"""Environment variables of unknown settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.protocol.worker import WorkerReport

ROOT = Path(__file__).parents[2]
TANDEM = ["-c", "from tandem.cli import main; main()"]


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "gateway"],
        ["-m", "tandem.agent", "--data-dir", "DATA"],
        [*TANDEM, "status"],
        [*TANDEM, "status", "--data-dir", "DATA"],
        [*TANDEM, "config"],
        [*TANDEM, "up"],
    ],
)
def test_a_process_that_meets_an_unknown_name_ends_with_a_sentence(tmp_path, command):
    done = _run([part.replace("DATA", str(tmp_path / "data")) for part in command], tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "TANDEM_DATA_DIRR is unknown; did you mean TANDEM_DATA_DIR?" in done.stderr


@pytest.mark.parametrize("module", ["trainer_service", "trainer_service.node", "sampler_service"])
def test_a_worker_that_meets_an_unknown_name_tells_its_launcher(tmp_path, module):
    report = tmp_path / "report"
    files = ["--spec-file", str(tmp_path / "none"), "--report-file", str(report)]
    done = _run(["-m", module, *files], tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    said = WorkerReport.model_validate_json(report.read_bytes())
    assert said.error_type == "unknown_setting"
    assert said.error.startswith("TANDEM_DATA_DIRR is unknown")


def _run(arguments, folder):
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**environment, "TANDEM_DATA_DIRR": str(folder)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
