"""The sizes of models, read from the headers of their files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tandem.backends.memory import ModelSize
from tandem.errors import InvalidRequest, describe, without_paths
from tandem.settings.gateway import GatewaySettings
from tandem.weights.model_config import model_files, text_config

_LARGEST_HEADER = 100 * 2**20
"""The largest header of a safetensors file, in bytes."""
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""Errors of a file that is missing or has another form, such as JSON that is no object."""

_read: dict[Path, ModelSize | str] = {}


def known_size(path: Path) -> ModelSize:
    """Return a model's size after `read_ahead`. Raises `InvalidRequest`."""
    known = _read.get(path, f"the size of the model {path.name} is not known")
    if isinstance(known, str):
        raise InvalidRequest(known)
    return known


async def read_ahead(model_path: str, settings: GatewaySettings, *, anew: bool = False) -> None:
    """Read a model's size in a thread, if it is unknown, or `anew`. `known_size` raises the
    error."""
    path = settings.data_dir / model_path
    if anew or not isinstance(_read.get(path), ModelSize):
        with suppress(InvalidRequest):
            await asyncio.to_thread(read_size, path)


def read_size(path: Path) -> ModelSize:
    """Read a model's size from its files' headers. Raises `InvalidRequest`."""
    try:
        size = _read[path] = _size_of(path)
    except InvalidRequest as error:
        _read[path] = error.message
        raise
    return size


def _size_of(path: Path) -> ModelSize:
    shapes: dict[str, list[int]] = {}
    try:
        for file in model_files(path):
            shapes |= dict(_shapes(file))
        size = ModelSize.of_shapes(shapes, text_config(path))
    except _UNREADABLE as error:
        why = without_paths(describe(error))
        raise InvalidRequest(f"the size of the model {path.name} cannot be read: {why}") from error
    if not shapes:
        raise InvalidRequest(f"{path.name} has no safetensors, so that its size is not known")
    return size


def _shapes(file: Path) -> Iterator[tuple[str, list[int]]]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(min(length, _LARGEST_HEADER)))
    if not isinstance(header, dict):
        raise ValueError(f"the header of {file.name} is no JSON object")
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, entry["shape"]
