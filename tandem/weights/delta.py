"""Changes between two files of the same size: how a version is written as what changed.

A delta version (`Manifest.delta_of`) has, for some of its files, a patch in their place,
`NAME.patch`: what makes the file out of the one of the same name of the version that it is a delta
of. A file is compared in words of two bytes, which is what a bfloat16 is, and in pieces of at most
`PIECE_BYTES`, none of which crosses from one tensor into the next. A patch is a sequence of
changes:

    start: u64      where in the file the piece begins
    gaps: u32       bytes of the gaps that follow; 0: the values are the whole piece
    values: u32     bytes of the values that follow
    …               the gaps, then the values

A gap is the number of words that stay between a changed one and the one before, as one byte. 255
means 255 words and that the gap goes on: so the bytes of the gaps, added up, are positions, and
where hardly anything changes they are a 255th of the words. Numbers are little-endian.

Needs numpy and nothing else; whoever writes or reads weights imports it, and the gateway does not.
"""

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
"""A piece that is being compared, and all that comes of it, stays in a core's cache."""
_HEADER = struct.Struct("<QII")
_WORD = np.dtype("<u2")
_GOES_ON = 255


def encode(old: Bytes, new: Bytes, *, start: int) -> list[memoryview]:
    """Return the change that makes `new` out of `old`, two pieces that begin at `start`, as parts
    to be written one after the other; nothing if they are equal. It has never more bytes than `new`
    and a header."""
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
    """As `np.flatnonzero`, in half of the time where few are: of eight at a time first. Above a
    tenth, numpy takes another way, which is faster."""
    if different.size % 8 or count * 10 > different.size:
        return np.flatnonzero(different)
    eights = different.view(np.uint64)
    found = np.flatnonzero(eights != 0)
    within = np.flatnonzero(eights[found].view(np.bool_))
    positions: npt.NDArray[np.int64] = (found << 3)[within >> 3] + (within & 7)
    return positions


def _gaps(positions: npt.NDArray[np.int64]) -> Bytes:
    """Literal example: positions 0, 1 and 257 are the gaps 0, 0, 255, 0."""
    gaps = np.diff(positions, prepend=-1) - 1
    longer = np.flatnonzero(gaps >= _GOES_ON)
    times = gaps[longer] // _GOES_ON
    gaps[longer] -= times * _GOES_ON
    return np.insert(gaps.astype(np.uint8), np.repeat(longer, times), _GOES_ON)


@dataclass(frozen=True)
class Change:
    """What changed in one piece, which begins at `start`; without `gaps`, the `values` are all of
    it."""

    start: int
    gaps: Bytes
    values: Bytes

    def apply(self, whole: Bytes, *, start: int) -> None:
        """Change the part of a file that begins at `start`. Raises `ValueError` if this change goes
        beyond it."""
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
    """The changes of a file, in its order. They are read from the disk as they are used."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self._changes = changes
        self._starts = [change.start for change in changes]

    @classmethod
    def open(cls, file: Path) -> Patch:
        """Raises `OSError`, or `ValueError` for what is no patch."""
        if not file.stat().st_size:  # nothing has changed, and nothing can be mapped
            return cls([])
        return cls(list(_changes(np.asarray(np.memmap(file, np.uint8, mode="r")))))

    def within(self, start: int, size: int) -> Sequence[Change]:
        """Return the changes of a part of the file that is made of whole pieces: a tensor."""
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
