"""Safetensors files read and written piece by piece, where the library wants all in memory.

Format: an unsigned 64-bit little-endian length, that many bytes of JSON, then the tensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tandem.errors import InvalidRequest

_BLOCK_BYTES = 8 * 2**20
_ALIGNMENT = 8
_METADATA = "__metadata__"


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies: `start` and `bytes` in `file`. `dtype` as the format writes it."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int

    def copy_to(self, target: BinaryIO) -> None:
        with self.file.open("rb") as source:
            source.seek(self.start)
            left = self.bytes
            while left:
                block = source.read(min(left, _BLOCK_BYTES))
                if not block:
                    raise InvalidRequest(f"{self.file.name} ends within {self.name}")
                target.write(block)
                left -= len(block)


def read_header(file: Path) -> dict[str, TensorPlace]:
    """The tensors of a file in the order in which they lie. Raises `InvalidRequest`."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = dict(json.loads(stream.read(length)))
        header.pop(_METADATA, None)
        places = [
            TensorPlace(
                file=file,
                name=name,
                dtype=str(entry["dtype"]),
                shape=tuple(entry["shape"]),
                start=8 + length + int(entry["data_offsets"][0]),
                bytes=int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
            )
            for name, entry in header.items()
        ]
    except (struct.error, ValueError, LookupError, TypeError) as error:
        raise InvalidRequest(f"{file.name} is not a safetensors file: {error}") from error
    return {place.name: place for place in sorted(places, key=lambda place: place.start)}


class TensorWriter:
    """The header for tensors like those given, which are then to be written in `order`."""

    def __init__(self, tensors: Mapping[str, TensorPlace]) -> None:
        # Wide types first: each tensor then starts at a multiple of its own width.
        self.order = sorted(
            tensors, key=lambda name: (-_width(tensors[name]), tensors[name].start, name)
        )
        header: dict[str, object] = {_METADATA: {"format": "pt"}}
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


def _width(place: TensorPlace) -> int:
    count = 1
    for size in place.shape:
        count *= size
    return place.bytes // count if count else 1
