"""The names of trainer backends, found without importing them.

A built-in backend is a file with `BACKEND` in the trainer's folder of backends. A package registers
its name in the entry-point group `tandem.trainer_backends`."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

ENTRY_POINT_GROUP = "tandem.trainer_backends"
_DEFINES = re.compile(r"^BACKEND\b", re.MULTILINE)


def known_backends() -> dict[str, str]:
    """Return the installed backends, each with the reason why it is unusable, or ""."""
    names = {*_built_in(), *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))}
    return {name: why_ambiguous(name) for name in sorted(names)}


def registered(name: str) -> list[EntryPoint]:
    """Return the packages' registrations of a name, usually one or none."""
    return list(entry_points(group=ENTRY_POINT_GROUP, name=name))


def why_ambiguous(name: str) -> str:
    """Return a sentence about several registrations of one name, or ""."""
    packages = [point.dist.name if point.dist else point.value for point in registered(name)]
    if name in _built_in():
        packages.insert(0, "tandem")
    if len(packages) < 2:
        return ""
    return (
        f"the trainer backend {name!r} is registered by {' and by '.join(packages)}: uninstall all "
        "but one"
    )


def _built_in() -> list[str]:
    service = find_spec("trainer_service")
    folders = service.submodule_search_locations if service is not None else None
    files = [file for folder in folders or () for file in Path(folder, "backends").glob("*.py")]
    return [file.stem for file in files if _DEFINES.search(file.read_text(encoding="utf-8"))]
