"""The installed package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tandem.blueprints.catalog import find_blueprints

ROOT = Path(__file__).parents[2]


def test_a_wheel_has_our_blueprints(tmp_path):
    pytest.importorskip("setuptools")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("tandem", "blueprints"):
        shutil.copytree(ROOT / name, tmp_path / name)
    build = "from setuptools.build_meta import build_wheel; build_wheel('made')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "made").glob("*.whl")
    with ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "installed")
    command = "from tandem.blueprints.catalog import find_blueprints; print(*find_blueprints())"
    found = subprocess.run(
        [sys.executable, "-c", command],
        cwd=tmp_path / "installed",
        check=True,
        capture_output=True,
        text=True,
    )
    assert set(found.stdout.split()) == find_blueprints().keys()
