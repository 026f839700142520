"""The files beside a model's weights in the Hugging Face layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from trainer_service.base_model import WEIGHT_SUFFIXES

_OURS = frozenset({"manifest.json", "adapter_config.json"})


def copy_small_files(
    source: Path, target: Path, *, dtype: str = "", untied: bool = False, adapter: bool = False
) -> list[Path]:
    """Configuration and tokenizer, so that the directory loads by itself. Returns the copies.

    The configuration is changed to say `dtype`, if one is given, and, when `untied`, that the
    output head has a weight of its own. An `adapter` gets none: with a `config.json`,
    transformers would look for a whole model beside it instead of at the base model.
    """
    copied = []
    for file in sorted(source.iterdir()):
        if (
            not file.is_file()
            or file.name in _OURS
            or file.name.endswith(WEIGHT_SUFFIXES)
            or file.name.endswith(".index.json")
            or file.name.startswith(".")
            or (adapter and file.name == "config.json")
        ):
            continue
        path = target / file.name
        if file.name == "config.json" and (dtype or untied):
            config = json.loads(file.read_text())
            path.write_text(json.dumps(_changed(config, dtype=dtype, untied=untied), indent=2))
        else:
            shutil.copyfile(file, path)
        copied.append(path)
    return copied


def _changed(config: Mapping[str, object], *, dtype: str, untied: bool) -> dict[str, object]:
    changed = dict(config)
    if dtype:
        changed.pop("torch_dtype", None)
        changed["dtype"] = dtype
    if untied:
        changed["tie_word_embeddings"] = False
        text = changed.get("text_config")
        if isinstance(text, dict) and "tie_word_embeddings" in text:
            changed["text_config"] = {**text, "tie_word_embeddings": False}
    return changed


def write_index(directory: Path, *, weight_map: Mapping[str, str], total_bytes: int) -> Path:
    """Says in which file each tensor is, as transformers expects of several files."""
    path = directory / "model.safetensors.index.json"
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    path.write_text(json.dumps(index, indent=1))
    return path
