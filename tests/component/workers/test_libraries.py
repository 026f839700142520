"""Idle workers' imports, in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import gc, os, sys
gc.freeze()  # as Python 3.12 does itself when it starts
from {module} import import_libraries
import_libraries()
print(*[name for name in {names} if name in sys.modules], gc.get_freeze_count() > 100_000)
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("trainer_service.service.libraries", ["torch", "trainer_service.service.hosted_runs"]),
        ("sampler_service.vllm.libraries", ["torch", "vllm"]),
    ],
)
def test_libraries_are_imported_also_where_python_has_frozen_objects(module, names):
    script = SCRIPT.format(module=module, names=names)
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines()[-1:] == [f"{' '.join(names)} True"], done.stderr[-2000:]


@pytest.mark.parametrize("module", ["trainer_service.__main__", "trainer_service.node"])
def test_a_trainer_sets_its_environment_before_it_imports_torch(module):
    """Otherwise waiting threads spin, which takes the cores of busy machines."""
    script = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["False"], done.stderr[-2000:]
