"""The safetensors files of a model's directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from tandem.weights import Manifest
from tandem.weights.manifest import MANIFEST_NAME
from tandem.weights.model_config import model_files
from tandem.weights.store import read_record

if TYPE_CHECKING:
    import torch


def weights_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model's directory. Raises `OSError` for a missing file."""
    if manifest_of(directory) is None:
        return model_files(directory)
    return sorted(directory.glob("*.safetensors"))


def read_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and values of all tensors, file by file. Raises `OSError`."""
    for file in weights_files(directory):
        yield from tensors_in(file)


def tensors_in(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and mapped values of a file's tensors, in its order."""
    with safe_open(file, framework="pt", device="cpu") as opened:
        for name in opened.offset_keys():
            yield name, opened.get_tensor(name)


def manifest_of(directory: Path) -> Manifest | None:
    file = directory / MANIFEST_NAME
    try:
        return Manifest.model_validate_json(read_record(file))
    except FileNotFoundError:
        return None
