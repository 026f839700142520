"""Checks that a model directory's weights are complete, by the headers of the files."""

from __future__ import annotations

import os
from pathlib import Path

from tandem.errors import InvalidRequest, describe
from tandem.weights.model_config import INDEX_NAME, model_files, read_json, text_config
from tandem.weights.tensors import check_content, read_header

SINGLE_NAME = "model.safetensors"
"""The weights file of a model without an index."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Endings of files that can run code when read. They are never read."""
_OTHERS = (".gguf", ".h5", ".msgpack", ".onnx")
_TEXTS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_HEADS = ("lm_head.weight", "embed_out.weight")
_SAMPLE = 3


def check_weights(directory: Path) -> None:
    """Raise `InvalidRequest`, with the file's name, unless all weights files are there and
    complete.

    Each file must have the tensors that the index lists."""
    places = tensors_by_file(directory)
    for name, wanted in places.items():
        found = read_header(directory / name)
        if gone := sorted(wanted - found.keys()):
            raise InvalidRequest(
                f"{name} lacks {listed(gone)}, which {INDEX_NAME} says it has: the files are of "
                "different models or versions. Fetch both again"
            )
        if not found:
            raise InvalidRequest(f"{name} holds no tensor")
    for name in _TEXTS:  # Git LFS also stores large text files
        if (directory / name).is_file():
            check_content(directory / name)


def tensors_by_file(directory: Path) -> dict[str, set[str]]:
    """Return the index's tensors by file, none without an index. Raises `InvalidRequest`."""
    try:
        index = read_json(directory / INDEX_NAME)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{INDEX_NAME} cannot be read: {describe(error)}") from error
    if not index and not (directory / INDEX_NAME).exists():
        if not os.path.lexists(directory / SINGLE_NAME):  # a dangling link is reported below
            raise InvalidRequest(_why_none(directory))
        return {SINGLE_NAME: set()}
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise InvalidRequest(f"{INDEX_NAME} names no file: its weight_map is missing or empty")
    files: dict[str, set[str]] = {}
    for tensor, name in places.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or "/" in name:
            raise InvalidRequest(f"{INDEX_NAME} names {name!r}, which is no safetensors file")
        files.setdefault(name, set()).add(tensor)
    if gone := sorted(name for name in files if not (directory / name).exists()):
        raise InvalidRequest(
            f"{listed(gone)} of {len(files)} files of {INDEX_NAME} are not there: the download was "
            "not finished. Fetch them again"
        )
    return files


def ties_head(directory: Path) -> bool:
    """Return whether output head and embeddings share one weight. Raises `InvalidRequest`."""
    tied = text_config(directory).get("tie_word_embeddings")
    if isinstance(tied, bool):
        return tied
    names = (name for file in model_files(directory) for name in read_header(file))
    return not any(name.endswith(_HEADS) for name in names)


def _why_none(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir())
    start = f"there is no {SINGLE_NAME} and no {INDEX_NAME}"
    if parts := [name for name in names if name.endswith(".safetensors")]:
        return f"{start}: {listed(parts)} alone do not say which tensors the model has"
    if others := [name for name in names if name.endswith((*PICKLES, *_OTHERS))]:
        return (
            f"{start}, but {listed(others)}: only safetensors are read, and pickles could run "
            "code. Load the model with transformers and save it again (save_pretrained)"
        )
    return f"{start}: the folder has no weights"


def listed(names: list[str]) -> str:
    """Example: `"a, b, c and 7 more"`."""
    more = len(names) - _SAMPLE
    return ", ".join(names[:_SAMPLE]) + (f" and {more} more" if more > 0 else "")
