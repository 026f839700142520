"""Reads from a model directory, without loading it, its length and its end tokens.

The sources are Hugging Face's `config.json`, `generation_config.json`, `tokenizer_config.json` and
`tokenizer.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

Json = dict[str, object]

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")


def read_json(path: Path) -> Json:
    """Read a JSON object; return an empty one if there is no such file. Raises `ValueError`."""
    try:
        return cast(Json, json.loads(path.read_bytes()))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error


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
    """Return the end-of-sequence tokens of the generation config, else of the config, else of the
    tokenizer, else none."""
    for config in (read_json(directory / "generation_config.json"), text_config(directory)):
        value = config.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(token) for token in value)
    return _tokenizer_end_token(directory)


def _tokenizer_end_token(directory: Path) -> tuple[int, ...]:
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
