"""What a process on a CPU has of its host for tensors that come and go, found out without any.

The GNU C library maps what is larger than a threshold by itself, and gives it back at once. What is
smaller lies in a heap, which keeps its largest extent: what is freed within it is used again for
what fits. How much is lost between depends on the order in which tensors come and go, so their
places are found here as malloc finds them: the smallest gap that is large enough, else the end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

MAPPED_FROM = 32 * 2**20
"""Bytes. What glibc raises its threshold to by itself, when large pieces are freed (mallopt(3))."""
_PAGE, _GRAIN = 4096, 16
_ALIGNED = 96
"""A gap must have so much more than what shall lie in it, which torch wants aligned."""

Trace = Sequence[tuple[int, int]]
"""Tensors as they come and go: which one, and its bytes, negative when it goes."""


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
