"""What `scripts/gpu_wheels.sh` asks for, and how large wheels travel; nothing is downloaded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESOLVED = (
    "numpy==2.3.5\nnvidia-ml-py==13.0\nnvidia-nccl-cu13==2.27\ntorch==2.13.0\npytest==9.2.0\n"
)
UV = f"""#!/bin/sh
for last; do :; done
cat > "$last" <<'LIST'
{RESOLVED}LIST
"""
# As pip, it downloads one large wheel; what else it is asked for, Python does.
PYTHON = f"""#!/bin/sh
if [ "$1" != -m ]; then exec {sys.executable} "$@"; fi
while [ "$1" != --dest ]; do shift; done
cp "$4" asked
head -c 62914570 /dev/urandom > "$2/large-1-py3-none-any.whl"
cp "$2/large-1-py3-none-any.whl" whole
"""


def test_torch_and_what_the_machine_has_stay_behind_and_large_wheels_are_cut(tmp_path: Path):
    for path in ("scripts/gpu_wheels.sh", "pyproject.toml", "constraints/gpu.txt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    for name, text in {"uv": UV, "python": PYTHON}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    done = subprocess.run(
        [tmp_path / "scripts/gpu_wheels.sh", "--have", "pytest"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "asked").read_text().split() == ["numpy==2.3.5", "nvidia-ml-py==13.0"]
    folder = tmp_path / "build/gpu-wheels"
    wheel = folder / "large-1-py3-none-any.whl"
    pieces = sorted(folder.iterdir())
    assert [piece.name.removeprefix(wheel.name) for piece in pieces] == [".piece-00", ".piece-01"]
    (join,) = (line for line in done.stdout.splitlines() if "for first in" in line)
    subprocess.run(["sh", "-c", join], cwd=tmp_path, check=True, timeout=60)
    assert wheel.read_bytes() == (tmp_path / "whole").read_bytes()
    assert "build/gpu-wheels/*.whl" in done.stdout
