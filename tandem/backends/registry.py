"""All trainer backends: the built-in ones, and those of installed packages.

A package names the module or the class of its description in the entry-point group
`tandem.trainer_backends`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from tandem.backends.description import BackendDescription, description_of
from tandem.errors import InvalidField, describe

ENTRY_POINT_GROUP = "tandem.trainer_backends"
_BUILT_IN = {"fsdp2": "tandem.backends.fsdp2", "trl": "tandem.backends.trl"}
REFUSED = {
    "torchtune": "torchtune is no trainer backend: its last release, 0.6.1, is of April 2025; use "
    "trl for whole jobs, or fsdp2"
}
"""Frameworks that people ask for, each with the reason against it."""


def known_backends() -> dict[str, str]:
    """Return all installed backends, each with the reason why it is unusable, or ""."""
    return _reasons(descriptions())


def backends_of_runs() -> dict[str, str]:
    """Return `known_backends`, also with the reason why no run can use a job backend."""
    found = descriptions()
    jobs = {
        name: f"the trainer backend {name!r} trains whole jobs; start one with `tandem train`"
        for name, each in found.items()
        if _is_job(each)
    }
    return _reasons(found) | jobs


def descriptions() -> dict[str, BackendDescription | str]:
    """Return the description of each installed backend by name, or the reason why it is unusable.

    Reasons: several packages register the name, or its description cannot be imported."""
    points: dict[str, list[EntryPoint]] = {name: [] for name in _BUILT_IN}
    for point in _registered(tuple(sys.path)):
        points.setdefault(point.name, []).append(point)
    return {name: _described(name, points[name]) for name in sorted(points)}


@cache
def _registered(_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Read the metadata of all installed packages, once for each `sys.path`. That takes 0.02 s,
    and many times longer on a busy disk. A gateway that takes over waits for it."""
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def described_frameworks() -> set[str]:
    return {each.framework for each in descriptions().values() if not isinstance(each, str)}


def job_backend(name: str) -> BackendDescription:
    """Return a usable job backend. Raises `InvalidField` with the field `backend`."""
    framework = name.partition("-")[0]  # `tandem train` writes the method behind it
    if framework in REFUSED:
        raise InvalidField(REFUSED[framework], field="backend")
    found = descriptions()
    described = found.get(name)
    if isinstance(described, str):
        raise InvalidField(described, field="backend")
    if described is None or described.kind != "job":
        jobs = [each for each, about in found.items() if _is_job(about)]
        raise InvalidField(
            f"{name[:64]!r} is no job backend; known: {', '.join(jobs)}", field="backend"
        )
    return described


def _reasons(found: Mapping[str, BackendDescription | str]) -> dict[str, str]:
    return {name: each if isinstance(each, str) else "" for name, each in found.items()}


def _is_job(about: BackendDescription | str) -> bool:
    return isinstance(about, BackendDescription) and about.kind == "job"


def _described(name: str, points: list[EntryPoint]) -> BackendDescription | str:
    """Return the description of a name, or why there is none."""
    packages = [point.dist.name if point.dist else point.value for point in points]
    if name in _BUILT_IN:
        packages.insert(0, "tandem")
    if len(packages) > 1:
        return (
            f"the trainer backend {name!r} is registered by {' and by '.join(packages)}: "
            "uninstall all but one"
        )
    try:
        found = points[0].load() if points else import_module(_BUILT_IN[name])
    except Exception as error:  # noqa: BLE001 - another package's code
        return f"the trainer backend {name!r} of {packages[0]} is unusable: {describe(error)}"
    candidates: Mapping[str, object] = {"": found} if isinstance(found, type) else vars(found)
    for each in candidates.values():
        described = description_of(each)
        if described is not None and described.name == name:
            return described
    return (
        f"the trainer backend {name!r} of {packages[0]} is unusable: its entry point names no "
        "module or class with @register_backend"
    )
