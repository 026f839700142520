"""What a model directory says without loading it: lengths, end tokens, and its tensors.

Reads Hugging Face's `config.json` and `generation_config.json` and the headers of safetensors
files (format: an unsigned 64-bit little-endian length, then that many bytes of JSON).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tandem.errors import LoadFailed

Json = dict[str, object]
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
_FLOATING = {"F64", "F32", "F16", "BF16"}
_MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True)
class TensorEntry:
    """Dtype (as safetensors writes it, such as "F32") and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]


Inventory = dict[str, TensorEntry]


def read_json(path: Path) -> Json:
    """An object of JSON; empty when there is no such file."""
    try:
        return cast(Json, json.loads(path.read_bytes()))
    except FileNotFoundError:
        return {}


def text_config(directory: Path) -> Json:
    """`config.json`, or the part of it that describes the language model."""
    config = read_json(directory / "config.json")
    nested = config.get("text_config")
    return {**config, **cast(Json, nested)} if isinstance(nested, dict) else config


def model_length(directory: Path) -> int | None:
    """The longest sequence that the model was made for, in tokens."""
    config = text_config(directory)
    values = [config.get(key) for key in _LENGTH_KEYS]
    return next((value for value in values if isinstance(value, int)), None)


def end_tokens(directory: Path) -> tuple[int, ...]:
    """The end-of-sequence tokens: of the generation config, else of the config, else none.

    (A tokenizer's end token that neither of them names is found by `tokenizer_end_token`.)
    """
    for config in (read_json(directory / "generation_config.json"), text_config(directory)):
        value = config.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(token) for token in value)
    return ()


def tokenizer_end_token(directory: Path) -> tuple[int, ...]:
    """The id of the tokenizer's end token, read from its files without loading it."""
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
    """Whether the output head is the embedding matrix."""
    return bool(text_config(directory).get("tie_word_embeddings", False))


def read_inventory(directory: Path) -> Inventory:
    """Names, dtypes and shapes of all tensors, from the headers alone.

    Raises `LoadFailed` when a file is not safetensors, or a name occurs twice.
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
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = dict(json.loads(stream.read(length)))
        header.pop("__metadata__", None)
        end = 8 + length + max((int(e["data_offsets"][1]) for e in header.values()), default=0)
        if file.stat().st_size != end:
            raise ValueError(f"it has {file.stat().st_size} bytes, not {end}")
        return {
            name: TensorEntry(dtype=str(entry["dtype"]), shape=tuple(entry["shape"]))
            for name, entry in header.items()
        }
    except (OSError, ValueError, LookupError, TypeError, struct.error) as error:
        raise LoadFailed(f"{file.parent.name}/{file.name} is not safetensors: {error}") from error


def loadable(inventory: Inventory, *, tied: bool) -> Inventory:
    """Without the tensors that no engine loads: a tied head, and rotary tables."""
    return {
        name: entry
        for name, entry in inventory.items()
        if not (tied and name.endswith("lm_head.weight"))
        and not name.endswith(
            ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
        )
    }


def check_inventory(offered: Inventory, *, expected: Inventory, name: str) -> None:
    """Raises `LoadFailed` unless a version has exactly the tensors that the engine has.

    Names and shapes must be equal. Any floating dtype will do, since the engine converts to
    its own; other dtypes must be equal.
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
