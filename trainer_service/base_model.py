"""The base model of a run: its name, its files, and how to tell it from another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_SAMPLES = 64
_SAMPLE_BYTES = 64 * 2**10


@dataclass(frozen=True)
class BaseModelFiles:
    """`name` is what the gateway calls it; `path` its directory in the Hugging Face layout."""

    name: str
    path: Path

    def fingerprint(self) -> str:
        """Tells models apart by their weights: XXH3-128 of the sizes of the weight files and
        of pieces spread over each (64 of 64 KiB; a smaller file as a whole).

        An adapter means nothing on other weights, and reading all of a large model to notice
        would take minutes. A model that was trained further differs all over.
        """
        digest = xxhash.xxh3_128()
        for file in sorted(self.path.iterdir()):
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
