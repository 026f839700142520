"""Which weight versions of a run are published as deltas: what has changed since a whole one.

A delta is always one of the newest whole version, so that a reader needs two folders and no more.
The longer ago that was, the more has changed. A new whole one is due when a delta has come to be
larger than what a version took on average since then, the whole one included: from then on that
average would only grow. And it is due when a delta has a quarter of the bytes of a whole version:
from there on, to find and to put in what changed takes longer than a volume takes for all of it,
unless it is slow. Where they all have, as with large learning rates, deltas are tried less and less
often.
"""

from __future__ import annotations

from dataclasses import dataclass

_PAYS = 0.25
_MOST_PAUSES = 32
"""Whole versions between two deltas of which none pays."""


@dataclass(frozen=True)
class Published:
    """A version that the trainer has written: of `bytes` for a reader and `written_bytes` on the
    disk, which are fewer where it is a delta of `delta_of`."""

    version: str
    bytes: int
    written_bytes: int
    delta_of: str


@dataclass(eq=False)
class DeltaBase:
    """What the next version of a run can be a delta of: a whole version, which the run's newest one
    is or is a delta of. Forgotten with the gateway: the next version is whole then.

    Use: ask the trainer for a delta of `next()`, and say with `note` what it wrote.
    """

    _whole: str = ""
    _written: int = 0
    _versions: int = 0
    _failed: int = 0
    _pause: int = 0

    def next(self) -> str:
        """Return the name of the version that the next may be a delta of, "" if it is to be
        whole."""
        if self._whole and self._pause:
            self._pause -= 1
            return ""
        return self._whole

    def note(self, published: Published) -> None:
        """Note a version of the run."""
        written, whole = published.written_bytes, published.bytes
        if not published.delta_of:
            self._whole, self._written, self._versions = published.version, written, 1
            return
        if published.delta_of != self._whole:  # published for an earlier gateway
            return self.forget()
        self._written += written
        self._versions += 1
        if written >= _PAYS * whole:
            self._failed += 1
            self._pause = min(2 ** (self._failed - 1), _MOST_PAUSES)
            self._whole = ""
        elif written * self._versions >= self._written:
            self._whole = ""
        else:
            self._failed = 0

    def forget(self) -> None:
        """Make the next version a whole one: something is wrong."""
        self._whole = ""
