"""Files of models that have a size, and no weights."""

from __future__ import annotations

import json
from pathlib import Path


def write_weights(folder: Path, name: str, shape: list[int]) -> None:
    """Write the header of a safetensors file with one tensor."""
    entry = {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}
    header = json.dumps({"__metadata__": {"format": "pt"}, name: entry}).encode()
    file = folder / f"model-{name}.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
