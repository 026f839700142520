"""Marks folders in use, so that the garbage collector spares them.

A folder is named by its path in the data directory, for example
`weights/s-ab12_train_0/v000001-9f2c41d0`. Readers and writers pin it. A lookup of a checkpoint's
name marks the run as resolving until the folder is pinned, because the name may be deleted in
between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pins:
    """In memory only: pins end with the process."""

    def __init__(self) -> None:
        self._folders: Counter[str] = Counter()
        self._resolving: Counter[str] = Counter()

    def folders(self) -> set[str]:
        return set(self._folders)

    def pin(self, folder: str) -> None:
        """Pin a folder until as many calls of `unpin`."""
        self._folders[folder] += 1

    def unpin(self, folder: str) -> None:
        _decrement(self._folders, folder)

    def pin_until(self, on_end: Callable[[Callable[[object], None]], None], folder: str) -> None:
        """Pin a folder until `on_end` calls back."""
        self.pin(folder)
        on_end(lambda _: self.unpin(folder))

    @contextmanager
    def pinned(self, folder: str) -> Iterator[None]:
        self.pin(folder)
        try:
            yield
        finally:
            self.unpin(folder)

    @contextmanager
    def resolving(self, run_id: str) -> Iterator[None]:
        """Mark, for the block, that a name of this run is being looked up."""
        self._resolving[run_id] += 1
        try:
            yield
        finally:
            _decrement(self._resolving, run_id)

    def is_resolving(self, run_id: str) -> bool:
        return run_id in self._resolving


def _decrement(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
