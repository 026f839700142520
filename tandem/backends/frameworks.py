"""The environments of frameworks on this machine.

A framework whose packages exclude Tandem's has an environment of its own below Tandem's. Example:
`.venv/trl`. Another framework is a package beside Tandem."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from tandem.errors import FrameworkMissing


@dataclass(frozen=True)
class Framework:
    """An installed framework. `python` is the interpreter of its environment."""

    name: str
    version: str
    python: str


def installed_frameworks(names: Iterable[str]) -> tuple[Framework, ...]:
    """Return the frameworks of these names that are installed here."""
    found = (_installed(name) for name in sorted(set(names)))
    return tuple(framework for framework in found if framework is not None)


def framework_missing(name: str) -> FrameworkMissing:
    """Return the error for a framework that the host of trainers lacks."""
    return FrameworkMissing(
        f"{name} is not installed on the host of trainers: run `make setup-{name}` there, or use "
        f"the image of deploy/{name}.Dockerfile"
    )


def own_environment(name: str) -> Path:
    """Return the folder of a framework's own environment, also if it is not there."""
    return Path(sys.prefix, name)


def _installed(name: str) -> Framework | None:
    folder = own_environment(name)
    if (python := folder / "bin" / "python").exists():
        packages = [str(path) for path in folder.glob("lib/python*/site-packages")]
        for found in distributions(name=name, path=packages):
            return Framework(name, found.version, str(python))
    try:
        return Framework(name, version(name), sys.executable)
    except PackageNotFoundError:
        return None
