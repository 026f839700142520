"""Finds a backend by its name."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TypeVar

from tandem.errors import WorkerStartFailed
from trainer_service.backends.base import TrainerBackend

ENTRY_POINT_GROUP = "tandem.trainer_backends"

_REGISTERED: dict[str, type[TrainerBackend]] = {}

Backend = TypeVar("Backend", bound=type[TrainerBackend])


def trainer_backend(name: str) -> Callable[[Backend], Backend]:
    """Registers a class under a name: `@trainer_backend("fsdp2")`."""

    def register(backend: Backend) -> Backend:
        _REGISTERED[name] = backend
        return backend

    return register


def backend_named(name: str) -> type[TrainerBackend]:
    """The class registered under `name`, here or by an installed package.

    Raises `WorkerStartFailed` that names those known.
    """
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in _REGISTERED and name in points:
        loaded: type[TrainerBackend] = points[name].load()
        _REGISTERED.setdefault(name, loaded)
    if name not in _REGISTERED:
        known = ", ".join(sorted({*_REGISTERED, *points}))
        raise WorkerStartFailed(f"unknown trainer backend {name!r}; known: {known}")
    return _REGISTERED[name]
