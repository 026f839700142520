"""Reads a model directory without loading it: its length, its end tokens and its tensors.

The sources are Hugging Face's `config.json`, `generation_config.json`, `tokenizer_config.json` and
`tokenizer.json`, and the headers of safetensors files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from safetensors import SafetensorError, safe_open

from tandem.errors import LoadFailed

Json = dict[str, object]
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
_FLOATING = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class TensorEntry:
    """Dtype (in safetensors' notation, such as "F32") and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


Inventory = dict[str, TensorEntry]


def read_json(path: Path) -> Json:
    """Read a JSON object; return an empty one if there is no such file."""
    try:
        return cast(Json, json.loads(path.read_bytes()))
    except FileNotFoundError:
        return {}


def text_config(directory: Path) -> Json:
    """Return `config.json` with the part that describes the language model on the top level."""
    config = read_json(directory / "config.json")
    nested = config.get("text_config")
    return {**config, **cast(Json, nested)} if isinstance(nested, dict) else config


def model_length(directory: Path) -> int | None:
    """Return the longest sequence that the model was made for, in tokens."""
    config = text_config(directory)
    values = [config.get(key) for key in _LENGTH_KEYS]
    return next((value for value in values if isinstance(value, int)), None)


def end_tokens(directory: Path) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of the generation config, else of the config, else none
    (`tokenizer_end_token` finds the tokenizer's)."""
    for config in (read_json(directory / "generation_config.json"), text_config(directory)):
        value = config.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(token) for token in value)
    return ()


def tokenizer_end_token(directory: Path) -> tuple[int, ...]:
    """Return the tokenizer's end token, read from its files without loading it, or none."""
    name = read_json(directory / "tokenizer_config.json").get("eos_token")
    content = name.get("content") if isinstance(name, dict) else name
    if not isinstance(content, str):
        return ()
    tokenizer = read_json(directory / "tokenizer.json")
    for added in cast(list[Json], tokenizer.get("added_tokens", [])):
        if added.get("content") == content:
            return (int(cast(int, added["id"])),)
    vocabulary = cast(Json, tokenizer.get("model", {})).get("vocab", {})
    if isinstance(vocabulary, dict) and content in vocabulary:
        return (int(vocabulary[content]),)
    return ()


def is_tied(directory: Path) -> bool:
    """Return whether the output head is the embedding matrix."""
    return bool(text_config(directory).get("tie_word_embeddings", False))


def read_inventory(directory: Path) -> Inventory:
    """Return the dtypes and shapes of a directory's tensors by name, from the headers alone.

    Raises `LoadFailed` if a file is not safetensors or not whole, or a name occurs twice.
    """
    inventory: Inventory = {}
    for file in sorted(directory.glob("*.safetensors")):
        for name, entry in _read_header(file).items():
            if name in inventory:
                raise LoadFailed(f"{directory.name}: the tensor {name} is in more than one file")
            inventory[name] = entry
    if not inventory:
        raise LoadFailed(f"{directory.name} holds no safetensors file")
    return inventory


def _read_header(file: Path) -> Inventory:
    try:
        with safe_open(file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {
                name: TensorEntry(dtype=part.get_dtype(), shape=tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise LoadFailed(f"{file.parent.name}/{file.name} is not safetensors: {error}") from error


def loadable(inventory: Inventory, *, tied: bool) -> Inventory:
    """Drop the tensors that no engine loads: a tied output head, and rotary tables."""
    return {
        name: entry
        for name, entry in inventory.items()
        if not (tied and name.endswith("lm_head.weight"))
        and not name.endswith(
            ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
        )
    }


def check_inventory(offered: Inventory, *, expected: Inventory, name: str) -> None:
    """Raise `LoadFailed` unless a version has exactly the tensors that the engine expects.

    Names and shapes must be equal, and so must dtypes, except that any floating dtype may stand for
    another: the engine converts to its own.
    """
    missing = sorted(expected.keys() - offered.keys())
    foreign = sorted(offered.keys() - expected.keys())
    if missing or foreign:
        parts = [f"lacks {_some(missing)}"] * bool(missing) + [
            f"has {_some(foreign)} too many"
        ] * bool(foreign)
        raise LoadFailed(f"{name} {' and '.join(parts)}")
    for tensor, entry in offered.items():
        want = expected[tensor]
        if entry.shape != want.shape:
            raise LoadFailed(
                f"{name}: {tensor} has the shape {list(entry.shape)}, not {list(want.shape)}"
            )
        if entry.dtype != want.dtype and not {entry.dtype, want.dtype} <= _FLOATING:
            raise LoadFailed(f"{name}: {tensor} is {entry.dtype}, not {want.dtype}")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
