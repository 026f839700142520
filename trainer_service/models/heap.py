"""What a process on a CPU has of its host for tensors that come and go, found out without any.

The GNU C library maps by itself what is larger than a threshold and finds no gap, and gives it back
at once. What is smaller lies in a heap, which keeps its largest extent: what is freed within it is
used again for what fits. glibc raises that threshold to 32 MiB when large tensors are freed, and
the gaps then take as much as lives: before each tensor lie some 48 bytes that were cut off to align
it, small objects take these, and a gap between two of them has not the room for an aligned tensor
of its own size. How much is lost depends on every small object, and cannot be planned. So a trainer
holds the threshold where it is (`map_large_tensors`).

Between smaller tensors, what is lost depends on the order in which they come and go, so their
places are found here as malloc finds them: the smallest gap that is large enough, else the end.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, insort
from collections.abc import Sequence

MAPPED_FROM = 17 * 2**16
"""Bytes. More than a MiB: libraries take buffers of just that, hundreds in a pass over sequences of
128 tokens, and to map each anew nearly doubled the processor time."""
_KEPT_AT_END = 64 * 2**20
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""Parameters of mallopt(3)."""
_PAGE, _GRAIN = 4096, 16
_ALIGNED = 96
"""A gap must have so much more than what shall lie in it, which torch wants aligned."""

Trace = Sequence[tuple[int, int]]
"""Tensors as they come and go: which one, and its bytes, negative when it goes."""


def map_large_tensors() -> None:
    """Let this process's C library map what has `MAPPED_FROM` bytes, if it is glibc. What is freed
    at the heap's end stays there: glibc would give it back, once thresholds are set."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_MMAP_THRESHOLD, MAPPED_FROM)
        mallopt(_TRIM_THRESHOLD, _KEPT_AT_END)


def most_living(trace: Trace) -> int:
    """The most bytes that live at once."""
    most = living = 0
    for _, size in trace:
        living += size
        most = max(most, living)
    return most


def most_taken(trace: Trace) -> int:
    """The most bytes that the process has of its host at once, while what the trace tells happens
    twice: the second time finds the gaps that the first one left."""
    heap, places, mapped, most = _Heap(), dict[tuple[int, int], tuple[int, int]](), 0, 0
    for round_ in range(2):
        for which, size in trace:
            pages = -(-abs(size) // _PAGE) * _PAGE
            if abs(size) >= MAPPED_FROM:
                mapped += pages if size > 0 else -pages
            elif size > 0:
                places[round_, which] = heap.take(size)
            elif size < 0:
                heap.give_back(*places.pop((round_, which)))
            most = max(most, mapped + heap.extent)
    return most


class _Heap:
    """Places are pairs of a size and an address."""

    def __init__(self) -> None:
        self.extent = self._end = 0
        self._gaps: list[tuple[int, int]] = []
        self._size_at: dict[int, int] = {}
        self._start_of: dict[int, int] = {}

    def take(self, size: int) -> tuple[int, int]:
        size = -(-(size + 8) // _GRAIN) * _GRAIN
        found = bisect_left(self._gaps, (size + _ALIGNED, 0))
        if found == len(self._gaps):
            place = (size, self._end)
            self._end += size
            self.extent = max(self.extent, self._end)
            return place
        gap, address = self._gaps[found]
        self._close(gap, address)
        if gap - size <= _ALIGNED:
            return gap, address
        self._open(gap - size, address + size)
        return size, address

    def give_back(self, size: int, address: int) -> None:
        """Gaps beside it become one with it, and so does the end."""
        if after := self._size_at.get(address + size):
            self._close(after, address + size)
            size += after
        if (before := self._start_of.get(address)) is not None:
            size += address - before
            self._close(address - before, before)
            address = before
        if address + size == self._end:
            self._end = address
        else:
            self._open(size, address)

    def _open(self, size: int, address: int) -> None:
        insort(self._gaps, (size, address))
        self._size_at[address] = size
        self._start_of[address + size] = address

    def _close(self, size: int, address: int) -> None:
        del self._gaps[bisect_left(self._gaps, (size, address))]
        del self._size_at[address]
        del self._start_of[address + size]
