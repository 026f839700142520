"""Finds blueprints: our own, and those of further folders and of installed packages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from tandem.blueprints.description import FILE, Blueprint, read_blueprint
from tandem.errors import InvalidRequest, UserError, describe

ENTRY_POINT_GROUP = "tandem.blueprints"
"""A package names itself here, and its folder has one folder for each of its blueprints."""
_OURS = Path(__file__).parents[2] / "blueprints"
"""In a checkout and in a wheel, the folder `blueprints` is beside `tandem`."""


def find_blueprints(folders: Sequence[Path] = ()) -> dict[str, Blueprint | str]:
    """Return the blueprints by name, or the reason why one is unusable.

    `folders` come first, and each has one folder for each of its blueprints."""
    found: dict[str, Blueprint | str] = {}
    places, faults = _of_packages()
    for folder in (*folders, _OURS, *places):
        for file in sorted(folder.glob(f"*/{FILE}")):
            try:
                found.setdefault(file.parent.name, read_blueprint(file.parent))
            except InvalidRequest as error:
                found.setdefault(file.parent.name, error.message)
    return {**faults, **found}


def blueprint_named(name: str, folders: Sequence[Path] = ()) -> Blueprint:
    """Return a usable blueprint. Raises `UserError`, and `InvalidRequest` if it is unusable."""
    found = find_blueprints(folders)
    blueprint = found.get(name)
    if blueprint is None:
        known = ", ".join(found) or "none"
        raise UserError(f"there is no blueprint {name[:100]!r}; known: {known}")
    if isinstance(blueprint, str):
        raise InvalidRequest(f"the blueprint {name} is unusable: {blueprint}")
    return blueprint


def _of_packages() -> tuple[list[Path], dict[str, str]]:
    """Return the folders of packages, and why others have none, by name of the entry point."""
    places: list[Path] = []
    faults: dict[str, str] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            spec = find_spec(point.value)
            found = spec.submodule_search_locations if spec is not None else None
        except (ImportError, ValueError) as error:
            faults[point.name] = f"its entry point {point.value} is unusable: {describe(error)}"
            continue
        if not found:
            faults[point.name] = f"its entry point {point.value} names no package"
        places += map(Path, found or ())
    return places, faults
