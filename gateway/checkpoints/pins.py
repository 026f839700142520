"""What on the disk is in use, so that nobody removes it meanwhile.

A place is a folder below the data directory, such as `weights/s-ab12_train_0/v000001-9f2c41d0`.
Whoever reads or writes one holds it. Whoever looks up what a checkpoint's name stands for
holds the run, until it holds the place: in between, the name may go.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pins:
    """In memory alone: what holds something dies with us."""

    def __init__(self) -> None:
        self._places: Counter[str] = Counter()
        self._runs: Counter[str] = Counter()
        self._owned: defaultdict[str, list[str]] = defaultdict(list)
        self._put_off: dict[str, Callable[[], None]] = {}

    def places(self) -> set[str]:
        """What is held now."""
        return set(self._places)

    def looked_up(self, run_id: str) -> bool:
        """Whether somebody is looking up a name of this run now."""
        return run_id in self._runs

    def when_looked_up(self, run_id: str, then: Callable[[], None]) -> None:
        """Calls `then` once, when nobody looks up a name of this run any more."""
        self._put_off[run_id] = then

    def pin(self, place: str) -> None:
        """Keeps a place until as many calls of `unpin`."""
        self._places[place] += 1

    def unpin(self, place: str) -> None:
        _drop(self._places, place)

    @contextmanager
    def hold(self, place: str) -> Iterator[None]:
        self.pin(place)
        try:
            yield
        finally:
            self.unpin(place)

    @contextmanager
    def look_up(self, run_id: str) -> Iterator[None]:
        self._runs[run_id] += 1
        try:
            yield
        finally:
            _drop(self._runs, run_id)
            if run_id not in self._runs and run_id in self._put_off:
                self._put_off.pop(run_id)()

    def take(self, place: str, *, owner: str) -> None:
        """Holds a place for a run, until `give_back` or the end of the run."""
        self._places[place] += 1
        self._owned[owner].append(place)

    def give_back(self, place: str, *, owner: str) -> None:
        """Once for each `take`; does nothing when the run has ended meanwhile."""
        if place in self._owned.get(owner, ()):
            self._owned[owner].remove(place)
            _drop(self._places, place)

    def end_owner(self, owner: str) -> None:
        """Gives back all that a run took."""
        for place in self._owned.pop(owner, ()):
            _drop(self._places, place)


def _drop(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
