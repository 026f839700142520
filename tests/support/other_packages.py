"""Other projects' packages, built and installed like a user does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tandem.backends.registry import ENTRY_POINT_GROUP

PLAIN_BACKEND = Path(__file__).parent / "plain_backend"
_DESCRIPTION = """
@register_backend({name!r}, implementation={implementation!r}, capabilities=())
class Of{number}(TrainingSpec):
    pass
"""


def install(source: Path, folder: Path) -> Path:
    """Build a package's wheel and install it below `folder`, without downloads.

    Returns the folder for `PYTHONPATH`."""
    shutil.copytree(source, copy := folder / "source")  # building leaves files beside it
    _pip("wheel", "--no-build-isolation", "--wheel-dir", folder / "wheels", copy)
    (wheel,) = (folder / "wheels").iterdir()
    _pip("install", "--target", folder / "installed", wheel)
    return folder / "installed"


def register(folder: Path, package: str, **backends: str) -> None:
    """Write the description and the metadata of a package with step backends.

    `backends` are import paths of classes by name."""
    module = f"{package.replace('-', '_')}_description"
    about = folder / f"{package.replace('-', '_')}-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    points = [f"{name} = {module}" for name in backends]
    (about / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINT_GROUP}]", *points, ""]))
    lines = [
        "from tandem.backends import register_backend",
        "from tandem.protocol.worker import TrainingSpec",
    ]
    lines += [
        _DESCRIPTION.format(name=name, implementation=path, number=number)
        for number, (name, path) in enumerate(backends.items())
    ]
    (folder / f"{module}.py").write_text("\n".join(lines))


def _pip(command: str, *arguments: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", command, "--no-deps", "--no-index", "--quiet", *arguments],
        check=True,
    )
