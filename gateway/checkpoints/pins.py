"""Which folders are in use, so that the garbage collector leaves them alone.

A folder is named by its path relative to the data directory, for example
`weights/s-ab12_train_0/v000001-9f2c41d0`. Code that reads or writes a folder pins it. Code that
looks up which folder a checkpoint's name stands for marks the run as resolving until it has
pinned the folder, because the name may be deleted in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Pins:
    """Kept in memory only: pins end with the process that set them."""

    def __init__(self) -> None:
        self._folders: Counter[str] = Counter()
        self._resolving: Counter[str] = Counter()

    def folders(self) -> set[str]:
        """Return the folders that are pinned now."""
        return set(self._folders)

    def pin(self, folder: str) -> None:
        """Pin a folder; it stays pinned until `unpin` was called as often."""
        self._folders[folder] += 1

    def unpin(self, folder: str) -> None:
        _decrement(self._folders, folder)

    @contextmanager
    def pinned(self, folder: str) -> Iterator[None]:
        """Pin a folder while the block runs."""
        self.pin(folder)
        try:
            yield
        finally:
            self.unpin(folder)

    @contextmanager
    def resolving(self, run_id: str) -> Iterator[None]:
        """Mark that a name of this run is being looked up while the block runs."""
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
