"""The tensors of a safetensors file, by its header.

The format is an unsigned 64-bit little-endian length, that many bytes of JSON, then the tensors.
Only the header is read."""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tandem.errors import InvalidRequest, describe
from tandem.weights.store import read_again

METADATA = "__metadata__"
"""The key of a header that names no tensor."""
_BLOCK_BYTES = 8 * 2**20
_POINTER = b"version https://git-lfs"
STORED_TYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}
"""The format's names of dtypes, by torch's names, for tensors of a version."""
_WIDTHS = {
    name: 1 if name == "BOOL" else int(name.strip("BFIU")) // 8 for name in STORED_TYPES.values()
}
"""Bytes of an element. Base models have other dtypes too."""
MOST_HEADER_BYTES = 32 * 2**20
_MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in a file: `bytes` bytes from `start`. `dtype` is the format's name."""

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


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return a file's tensors in file order. Retries a missing or stale file. Raises
    `InvalidRequest`.

    The file may come from anybody. The tensors must fill it without gaps and overlaps, so a false
    header cannot make a reader allocate more than the file's size."""
    try:
        return read_again(_read_header, file)
    except OSError as error:
        raise _unreadable(file, error) from error


def check_content(file: Path) -> None:
    """Raise `InvalidRequest` if a file is unreadable, empty, or a pointer of Git LFS."""
    try:
        read_again(_check_content, file)
    except OSError as error:
        raise _unreadable(file, error) from error


def _read_header(file: Path) -> dict[str, StoredTensor]:
    _check_content(file)
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, MOST_HEADER_BYTES):
                raise ValueError(f"its header cannot have {length} bytes")
            header = json.loads(stream.read(length), object_pairs_hook=_without_repetitions)
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
        header.pop(METADATA, None)
        start = 8 + length
        places = [_place(file, name, entry, start) for name, entry in header.items()]
        places.sort(key=lambda place: (place.start, place.bytes))
        for place in places:
            if place.start != start:
                raise ValueError(f"{place.name[:100]!r} does not begin where another tensor ends")
            start += place.bytes
        if start != size:
            raise ValueError(
                f"its tensors end at byte {start}, and the file at byte {size}. Where its download "
                "or copy was not finished, fetch it again"
            )
    except (struct.error, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{file.name} is not a safetensors file: {describe(error)}") from error
    return {place.name: place for place in places}


def _without_repetitions(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header names something twice")
    return found


def _place(file: Path, name: str, entry: object, start: int) -> StoredTensor:
    """The file's tensors begin at byte `start`."""
    match entry:
        case {"dtype": str() as dtype, "shape": list() as shape, "data_offsets": [begin, end]}:
            numbers = [begin, end, *shape]
        case _:
            raise ValueError(f"its header lacks a part of {name[:100]!r}")
    if len(shape) > _MOST_DIMENSIONS or not all(
        type(number) is int and 0 <= number < 2**63 for number in numbers
    ):
        raise ValueError(f"the shape or place of {name[:100]!r} is not possible")
    width = _WIDTHS.get(dtype)
    if end < begin or (width is not None and end - begin != math.prod(shape) * width):
        raise ValueError(f"{name[:100]!r} cannot have {end - begin} bytes")
    return StoredTensor(
        file=file,
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        start=start + begin,
        bytes=end - begin,
    )


def _check_content(file: Path) -> None:
    with file.open("rb") as stream:
        start = stream.read(len(_POINTER))
    if not start:
        raise InvalidRequest(f"{file.name} is empty")
    if start == _POINTER:
        raise InvalidRequest(
            f"{file.name} is a pointer of Git LFS, not the file itself: run `git lfs pull`"
        )


def _unreadable(file: Path, error: OSError) -> InvalidRequest:
    return InvalidRequest(f"{file.name} cannot be read: {error.strerror or describe(error)}")
