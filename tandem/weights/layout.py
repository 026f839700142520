"""The directory of a model in the Hugging Face layout, and its safetensors files.

Files are written piece by piece, because the library needs all tensors in memory."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tandem.protocol.worker import TrainingSpec
from tandem.weights.manifest import MANIFEST_NAME
from tandem.weights.model_config import INDEX_NAME
from tandem.weights.tensors import METADATA, StoredTensor

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_SAMPLES = 64
_SAMPLE_BYTES = 64 * 2**10


@dataclass(frozen=True)
class BaseModelFiles:
    """A base model: the gateway's `name` of it, and its directory (`path`).

    `fingerprint` identifies the weights in checkpoints of adapters. It is "" without adapters."""

    name: str
    path: Path
    fingerprint: str

    @classmethod
    def of_run(cls, path: Path, training: TrainingSpec, *, name: str = "") -> BaseModelFiles:
        """Return the files of a run, with the fingerprint of the files as just loaded. Raises
        `OSError`."""
        fingerprint = _fingerprint(path) if training.lora else ""
        return cls(name=name or path.name, path=path, fingerprint=fingerprint)


def _fingerprint(path: Path) -> str:
    """XXH3-128 of the weight files' sizes and of pieces spread over each file (64 of 64 KiB).

    Hashing all of a large model takes minutes, and further training changes weights everywhere."""
    digest = xxhash.xxh3_128()
    for file in sorted(path.iterdir()):
        if not file.name.endswith(WEIGHT_SUFFIXES):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        step = max(_SAMPLE_BYTES, size // _SAMPLES)
        with file.open("rb") as stream:
            for start in range(0, size, step):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


_OURS = frozenset({MANIFEST_NAME, "adapter_config.json"})
"""Left out if the base model is itself a published version."""


def copy_small_files(
    source: Path, target: Path, *, dtype: str = "", untied: bool = False, adapter: bool = False
) -> list[Path]:
    """Copy configuration and tokenizer, so that `target` loads by itself. Return the copies.

    The configuration gets `dtype` and, if `untied`, an output head with its own weight. An
    `adapter` gets no `config.json`, with which transformers would expect a whole model, and no
    README."""
    copied = []
    for file in sorted(source.iterdir()):
        if (
            not file.is_file()
            or file.name in _OURS
            or file.name.endswith(WEIGHT_SUFFIXES)
            or file.name.endswith(".index.json")
            or file.name.startswith(".")
            or (adapter and file.name in ("config.json", "README.md"))
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
    path = directory / INDEX_NAME
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    path.write_text(json.dumps(index, indent=1))
    return path


_ALIGNMENT = 8


class TensorWriter:
    """The header of a file with tensors like these. Their data follows in `order`."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        # Wide types first, so that each tensor starts at a multiple of its width.
        self.order = sorted(
            tensors, key=lambda name: (-_width(tensors[name]), tensors[name].start, name)
        )
        header: dict[str, object] = {METADATA: {"format": "pt"}}
        offset = 0
        for name in self.order:
            place = tensors[name]
            header[name] = {
                "dtype": place.dtype,
                "shape": list(place.shape),
                "data_offsets": [offset, offset + place.bytes],
            }
            offset += place.bytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self.header = struct.pack("<Q", len(text)) + text


def _width(place: StoredTensor) -> int:
    count = 1
    for size in place.shape:
        count *= size
    return place.bytes // count if count else 1
