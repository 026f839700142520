"""Patches between two files of equal size, for a version stored as changes.

A delta version (`Manifest.delta_of`) holds a patch `NAME.patch` in place of a changed file. The
patch turns the base version's file of that name into the new one. Files are compared in words of
two bytes (a bfloat16) and in pieces of at most `PIECE_BYTES`. No piece spans two tensors. A patch
is a sequence of changes:

    start: u64      the piece's offset in the file
    gaps: u32       bytes of gaps, or 0 if the values are the whole piece
    values: u32     bytes of values
    …               the gaps, then the values

A gap is the number of unchanged words before a changed one, as one byte. 255 means 255 words and a
continued gap. So the sums of the gaps are positions, and an almost unchanged piece needs one byte
per 255 words. Numbers are little-endian.

Needs only numpy. The gateway does not import it."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PIECE_BYTES = 2**20
"""Small enough that a compared piece and its results stay in a core's cache."""
_HEADER = struct.Struct("<QII")
_WORD = np.dtype("<u2")
_GOES_ON = 255


def encode(old: Bytes, new: Bytes, *, start: int) -> list[memoryview]:
    """Return the change from `old` to `new`, as parts to write in order. Empty if they are equal.

    Both are pieces that begin at `start`. The change has at most the bytes of `new` and a header.
    """
    assert old.size == new.size <= PIECE_BYTES
    if new.size % _WORD.itemsize == 0:
        words = new.view(_WORD)
        different = old.view(_WORD) != words
        count = int(np.count_nonzero(different))
        if not count:
            return []
        if count * (1 + _WORD.itemsize) < new.size:
            positions = _positions(different, count)
            gaps, values = _gaps(positions), words[positions].view(np.uint8)
            if gaps.size + values.size < new.size:
                header = _HEADER.pack(start, gaps.size, values.size)
                return [memoryview(header), gaps.data, values.data]
    elif np.array_equal(old, new):
        return []
    return [memoryview(_HEADER.pack(start, 0, new.size)), new.data]


def _positions(different: npt.NDArray[np.bool_], count: int) -> npt.NDArray[np.int64]:
    """Return `np.flatnonzero(different)`, in half the time if few are set: eight at a time first.

    Above a tenth, numpy is faster."""
    if different.size % 8 or count * 10 > different.size:
        return np.flatnonzero(different)
    eights = different.view(np.uint64)
    found = np.flatnonzero(eights != 0)
    within = np.flatnonzero(eights[found].view(np.bool_))
    positions: npt.NDArray[np.int64] = (found << 3)[within >> 3] + (within & 7)
    return positions


def _gaps(positions: npt.NDArray[np.int64]) -> Bytes:
    """Example: positions 0, 1 and 257 give the gaps 0, 0, 255, 0."""
    gaps = np.diff(positions, prepend=-1) - 1
    longer = np.flatnonzero(gaps >= _GOES_ON)
    times = gaps[longer] // _GOES_ON
    gaps[longer] -= times * _GOES_ON
    return np.insert(gaps.astype(np.uint8), np.repeat(longer, times), _GOES_ON)


@dataclass(frozen=True)
class Change:
    """The changes of one piece that begins at `start`. Without `gaps`, the `values` are the whole
    piece."""

    start: int
    gaps: Bytes
    values: Bytes

    def apply(self, whole: Bytes, *, start: int) -> None:
        """Apply it to the part of a file that begins at `start`. Raises `ValueError` beyond that
        part."""
        target = whole[self.start - start :]
        if not self.gaps.size:
            if self.values.size > target.size:
                raise ValueError("a change goes beyond the end of its tensor")
            target[: self.values.size] = self.values
            return
        ends = self.gaps != _GOES_ON
        values = self.values.view(_WORD)
        positions = np.cumsum(self.gaps, dtype=np.int64)[ends]
        positions += np.arange(positions.size)
        if positions.size != values.size:
            raise ValueError("a change has not as many positions as values")
        if positions.size and (positions[-1] + 1) * _WORD.itemsize > target.size:
            raise ValueError("a change goes beyond the end of its tensor")
        target[: target.size // _WORD.itemsize * _WORD.itemsize].view(_WORD)[positions] = values


class Patch:
    """The changes of a file, in order, read from disk on use."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self._changes = changes
        self._starts = [change.start for change in changes]

    @classmethod
    def open_patch(cls, file: Path) -> Patch:
        """Raises `OSError`, or `ValueError` for an invalid patch."""
        if not file.stat().st_size:  # no changes, and an empty file cannot be mapped
            return cls([])
        return cls(list(_changes(np.asarray(np.memmap(file, np.uint8, mode="r")))))

    def within(self, start: int, size: int) -> Sequence[Change]:
        """Return the changes of a part of whole pieces, such as a tensor."""
        first = bisect_left(self._starts, start)
        return self._changes[first : bisect_left(self._starts, start + size, lo=first)]


def _changes(content: Bytes) -> Iterator[Change]:
    place, before = 0, -1
    while place < content.size:
        if content.size - place < _HEADER.size:
            raise ValueError("it ends within a header")
        start, gaps, values = _HEADER.unpack(content[place : place + _HEADER.size].tobytes())
        place += _HEADER.size
        if content.size - place < gaps + values or start <= before:
            raise ValueError("it ends within a change, or its changes are not in order")
        if gaps and values % _WORD.itemsize:
            raise ValueError("a change holds half a value")
        end = place + gaps
        yield Change(start, content[place:end], content[end : end + values])
        place, before = end + values, start
