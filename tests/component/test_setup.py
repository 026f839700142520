"""The set-up script, with stand-ins for Python, pip and uv."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_STAND_IN = """#!/usr/bin/env bash
# As `python`, and as `uv`: logs what it was asked to install, and refuses what REFUSED matches.
case "$*" in
  --version) echo "Python 3.12.1"; exit ;;
  *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$0" .venv/bin/uv; exit ;;
  *" -c "* | "-c "*) exit 1 ;;
esac
echo "$(basename "$0") $*" >> "$LOG"
echo "$(basename "$0") $*" >&2
! [[ "$*" =~ $REFUSED ]]
"""


def set_up(folder: Path, *, build: str, refused: str) -> tuple[list[str], list[str]]:
    """Return the installed packages and the output."""
    (folder / "scripts").mkdir()
    shutil.copytree(ROOT / "constraints", folder / "constraints")
    for name in ("scripts/setup.sh", "scripts/install.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    python = folder / "python"
    python.write_text(_STAND_IN)
    python.chmod(0o755)
    given = {"PYTHON": str(python), "TANDEM_BUILD": build, "REFUSED": refused}
    done = subprocess.run(
        [folder / "scripts/setup.sh"],
        env=os.environ | given | {"LOG": str(folder / "log")},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return (folder / "log").read_text().splitlines(), done.stderr.splitlines()


def of_torch(lines: list[str]) -> list[str]:
    return [line.rpartition(" ")[2] for line in lines if " torch==" in line]


def test_a_cpu_build_at_hand_is_taken_before_any_other(tmp_path: Path):
    asked, said = set_up(tmp_path, build="cpu", refused="^$")
    assert [torch.endswith("+cpu") for torch in of_torch(asked)] == [True]
    assert not any(line.startswith("setup:") and ("GB" in line or "MB" in line) for line in said)


def test_without_a_cpu_build_at_hand_uv_finds_one_for_any_python(tmp_path: Path):
    asked, said = set_up(tmp_path, build="cpu", refused=r"\+cpu$")
    (by_uv,) = [line for line in asked if line.startswith("uv") and "torch==" in line]
    assert "--torch-backend=cpu" in by_uv
    assert asked[-1].startswith("uv") and asked[-1].endswith("-e .")
    assert not any(line.startswith("python") and of_torch([line]) for line in asked[2:])
    assert said.index(next(line for line in said if "MB" in line)) < said.index(by_uv)


def test_a_cuda_build_is_fetched_last_and_its_size_is_said_before(tmp_path: Path):
    asked, said = set_up(tmp_path, build="cpu", refused=r"\+cpu$|torch-backend")
    assert of_torch(asked)[0].endswith("+cpu")
    last = [line for line in asked if of_torch([line])][-1]
    assert last.startswith("python -m pip") and "+cpu" not in last
    told = next(index for index, line in enumerate(said) if "6.5 GB" in line)
    assert told < said.index(last)


@pytest.mark.parametrize(("build", "engine"), [("cpu", "engine-cpu"), ("gpu", "engine-cuda")])
def test_a_sampler_alone_is_installed_with_the_engine_of_the_build(
    tmp_path: Path, build: str, engine: str
):
    set_up(tmp_path, build=build, refused="^$")
    (tmp_path / "log").unlink()
    subprocess.run(
        [tmp_path / "scripts/install.sh", build, "sampler"],
        env=os.environ | {"REFUSED": "^$", "LOG": str(tmp_path / "log")},
        check=True,
        timeout=60,
    )
    (resolved,) = [
        line for line in (tmp_path / "log").read_text().splitlines() if "compile --q" in line
    ]
    assert [each for each in resolved.split() if each.startswith("engine")] == [engine]


@pytest.mark.parametrize("build", ["cpu", "gpu"])
def test_a_second_set_up_fetches_nothing(tmp_path: Path, build: str):
    asked, said = set_up(tmp_path, build=build, refused="^$")
    assert any("gigabytes" in line for line in said) == (build == "gpu")
    subprocess.run(
        [tmp_path / "scripts/setup.sh"],
        env=os.environ | {"TANDEM_BUILD": build},
        check=True,
        timeout=60,
    )
    assert (tmp_path / "log").read_text().splitlines() == asked


def test_make_setup_ends_with_what_to_do_next_and_other_targets_do_not(tmp_path: Path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    script = tmp_path / "scripts" / "setup.sh"
    script.write_text("#!/bin/sh\necho installing\n")
    script.chmod(0o755)

    def make(target: str) -> list[str]:
        ours = {name: value for name, value in os.environ.items() if "MAKE" not in name}
        done = subprocess.run(
            ["make", target], cwd=tmp_path, env=ours, capture_output=True, text=True
        )
        return done.stdout.splitlines()

    for _ in range(2):  # also if nothing is left to do
        assert "Next: make demo, or .venv/bin/tandem up" in make("setup")[-1]
    assert make("api-docs") == ["installing"]
