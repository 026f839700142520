"""Places of a sequence that were passed without anything in them.

Kept as stretches: a single request can name a place any distance ahead, and what it costs must
not grow with the distance. A client that leaves every second place out makes many stretches; of
those the newest are kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

_MOST = 2**16


class SequenceGaps:
    """Disjoint stretches `first … end - 1`, in order."""

    def __init__(self) -> None:
        self._stretches: list[tuple[int, int]] = []

    def __contains__(self, place: int) -> bool:
        return self._find(place) is not None

    def __len__(self) -> int:
        """How many stretches."""
        return len(self._stretches)

    def add(self, first: int, end: int, *, filled: Iterable[int]) -> None:
        """Adds the places from `first` to before `end`, which all lie behind those added before,
        but for those that are `filled`."""
        for place in sorted(place for place in filled if first <= place < end):
            if first < place:
                self._stretches.append((first, place))
            first = place + 1
        if first < end:
            self._stretches.append((first, end))
        del self._stretches[:-_MOST]

    def fill(self, place: int) -> bool:
        """Whether there was a hole, which there is no more."""
        at = self._find(place)
        if at is None:
            return False
        first, end = self._stretches[at]
        self._stretches[at : at + 1] = [
            (a, b) for a, b in ((first, place), (place + 1, end)) if a < b
        ]
        return True

    def _find(self, place: int) -> int | None:
        at = bisect_right(self._stretches, place, key=lambda stretch: stretch[0]) - 1
        return at if at >= 0 and place < self._stretches[at][1] else None
