"""GPU tests on a machine with few packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

# For Python, None means a module that cannot be found.
SCRIPT = """
import sys
for missing in ("vllm", "tinker", "fastapi", "uvicorn", "sqlalchemy", "psycopg"):
    sys.modules[missing] = None
from tests.gpu import __main__ as gpu
gpu.why_not = lambda: ""
raise SystemExit(gpu.main(sys.argv[1:]))
"""


def test_what_needs_packages_that_are_not_installed_is_left_out_and_named(tmp_path: Path):
    report = tmp_path / "report.xml"
    chosen = ["-k", "packed_row and cpu and 64", "--junitxml", str(report)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *chosen, "-p", "no:cacheprovider"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "left out: tests/gpu/test_experiments.py: tinker is not installed" in done.stdout
    assert "left out: tests/integration/test_lora.py: vllm is not installed" in done.stdout
    cases = list(ElementTree.parse(report).iter("testcase"))
    passed = [case for case in cases if not len(case)]
    assert len(passed) == 6, [case.attrib for case in cases]
    assert "left out: tests/gpu/test_training.py" not in done.stdout
