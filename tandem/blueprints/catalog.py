"""Finds blueprints: in the checkout, in further folders, and in installed packages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from tandem.blueprints.description import FILE, Blueprint, read_blueprint
from tandem.errors import InvalidRequest, UserError

ENTRY_POINT_GROUP = "tandem.blueprints"
"""A package names itself here, and its folder has one folder for each of its blueprints."""
_OURS = Path(__file__).parents[2] / "blueprints"


def find_blueprints(folders: Sequence[Path] = ()) -> dict[str, Blueprint | str]:
    """Return the blueprints by name, or the reason why one is unusable.

    `folders` come first, and each has one folder for each of its blueprints."""
    found: dict[str, Blueprint | str] = {}
    for folder in (*folders, _OURS, *_of_packages()):
        for file in sorted(folder.glob(f"*/{FILE}")):
            try:
                found.setdefault(file.parent.name, read_blueprint(file.parent))
            except InvalidRequest as error:
                found.setdefault(file.parent.name, error.message)
    return found


def blueprint_named(name: str, folders: Sequence[Path] = ()) -> Blueprint:
    """Return a usable blueprint. Raises `UserError`, and `InvalidRequest` if it is unusable."""
    found = find_blueprints(folders)
    blueprint = found.get(name)
    if blueprint is None:
        known = ", ".join(found) or "none; blueprints are in the folder of that name of a checkout"
        raise UserError(f"there is no blueprint {name[:100]!r}; known: {known}")
    if isinstance(blueprint, str):
        raise InvalidRequest(f"the blueprint {name} is unusable: {blueprint}")
    return blueprint


def _of_packages() -> list[Path]:
    specs = (find_spec(point.value) for point in entry_points(group=ENTRY_POINT_GROUP))
    places = (spec.submodule_search_locations or () for spec in specs if spec is not None)
    return [Path(place) for each in places for place in each]
