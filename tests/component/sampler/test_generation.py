"""The engine as a library. Its tests have a process of their own, because an engine sets variables
and changes vLLM for the whole process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("generation_cases.py")
FROM_PYTEST = ("PYTEST_", "COV_")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_an_engine_works_in_a_program_and_in_a_process_of_its_own():
    kept = {name: each for name, each in os.environ.items() if not name.startswith(FROM_PYTEST)}
    arguments = ["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(CASES)]
    ended = subprocess.run(
        [sys.executable, *arguments], env=kept, capture_output=True, text=True, timeout=550
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
