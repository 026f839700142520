"""Files of models that have a size or a form, but no usable weights."""

from __future__ import annotations

import json
from pathlib import Path


def write_weights(folder: Path, name: str, shape: list[int]) -> None:
    entry = {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}
    header = json.dumps({"__metadata__": {"format": "pt"}, name: entry}).encode()
    file = folder / f"model-{name}.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)


def tensor_file(*names: str, size: int = 256, fill: bytes = b"\0") -> bytes:
    """The first tensor has all numbers."""
    header, rest = b"", size
    while len(header) + 8 + rest != size:  # the rest's size is in the header
        rest = size - 8 - len(header)
        entries = {
            name: {"dtype": "U8", "shape": [end], "data_offsets": [0 if end else rest, rest]}
            for name, end in zip(names, [rest, *([0] * len(names))], strict=False)
        }
        header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + fill * rest
