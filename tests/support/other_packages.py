"""Other projects' packages, built and installed like a user does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tandem.backends.registry import ENTRY_POINT_GROUP

PLAIN_BACKEND = Path(__file__).parent / "plain_backend"


def install(source: Path, folder: Path) -> Path:
    """Build a package's wheel and install it below `folder`, without downloads.

    Returns the folder for `PYTHONPATH`."""
    shutil.copytree(source, copy := folder / "source")  # building leaves files beside it
    _pip("wheel", "--no-build-isolation", "--wheel-dir", folder / "wheels", copy)
    (wheel,) = (folder / "wheels").iterdir()
    _pip("install", "--target", folder / "installed", wheel)
    return folder / "installed"


def register(folder: Path, package: str, **backends: str) -> None:
    """Write the metadata of an installed package with trainer backends."""
    about = folder / f"{package.replace('-', '_')}-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    points = [f"{name} = {target}" for name, target in backends.items()]
    (about / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINT_GROUP}]", *points, ""]))


def _pip(command: str, *arguments: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", command, "--no-deps", "--no-index", "--quiet", *arguments],
        check=True,
    )
