"""`python -m tandem.demo.tiny_model` writes the demo's model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (["--help"], 0),
        (["--seed"], 2),
        ([], 2),
        (["model"], 0),
        (["model", "--tokenizer", "qwen"], 0),
        (["model", "--tokenizer", "other"], 2),
    ],
)
def test_only_a_folder_that_was_named_is_written(tmp_path: Path, given: list[str], status: int):
    command = [sys.executable, "-m", "tandem.demo.tiny_model", *given]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == status
    written = given[:1] if "model" in given and status == 0 else []
    assert [path.name for path in tmp_path.iterdir()] == written
