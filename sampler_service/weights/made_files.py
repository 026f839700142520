"""Files that the patches of a delta make, kept in memory from when they are verified until they are
loaded: so patches are applied once, and not while the engine waits.

It is this process's memory, which the system gives in large pages. Memory that another process
could map, the system gives in small ones, which takes longer than to apply the patches again. So an
engine in processes of its own applies them again, and so does one for which there is no room.
"""

from __future__ import annotations

import threading

import numpy as np

from tandem.host import free_memory_bytes
from tandem.weights.delta import Bytes

_SHARE = 4
"""Of the free memory, what may be used is one part of so many."""


class MadeFiles:
    """The `contents` of the files of one version that were made, by name."""

    def __init__(self, *, room: int | None = None) -> None:
        """`room` in bytes is what may be used, if not a part of what is free by then."""
        self._room = room
        self._lock = threading.Lock()
        self.contents: dict[str, Bytes] = {}

    def make(self, name: str, size: int) -> Bytes | None:
        """Return the memory of a file, to be filled, or None if there is no room for it."""
        with self._lock:
            room = free_memory_bytes() // _SHARE if self._room is None else self._room
            if size > room:
                return None
            self._room = room - size
        self.contents[name] = np.empty(size, np.uint8)
        return self.contents[name]
