"""Chooses the weight versions of a run that are published as deltas.

A delta's base is the newest whole version, so a reader needs two folders. Deltas grow with the
distance to their base. A whole version is due when a delta exceeds the average size since the last
whole one, or a quarter of a whole version. After repeated deltas of that size, deltas are tried
less and less often."""

from __future__ import annotations

from dataclasses import dataclass

_PAYS = 0.25
_MOST_PAUSES = 32
"""Most whole versions between two tried deltas."""


@dataclass(frozen=True)
class Published:
    """A published version. `bytes` is its size for a reader, `written_bytes` its size on the disk,
    which is smaller for a delta of `delta_of`."""

    version: str
    bytes: int
    written_bytes: int
    delta_of: str


@dataclass(eq=False)
class DeltaBase:
    """The base of a run's next delta, forgotten when the gateway ends. Ask the trainer for a delta
    of `next()`, then call `note_published` with the result."""

    _whole: str = ""
    _written: int = 0
    _versions: int = 0
    _failed: int = 0
    _pause: int = 0

    def next(self) -> str:
        if self._whole and self._pause:
            self._pause -= 1
            return ""
        return self._whole

    def note_published(self, published: Published) -> None:
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
        self._whole = ""
