"""Complete checkpoints of which the database knows nothing, kept for a time: `DATA/quarantine`.

A folder has the path there that it had in the data directory. It goes when its time is over and
the gateway has seen that for a grace period, so that a clock that jumped removes nothing. Two
empty files in the folder have the times as theirs; the time of a folder without them, since a crash
came between, begins when it is seen.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from tandem.errors import describe
from tandem.telemetry import get_log
from tandem.weights.store import give_name, make_folder

_SINCE = ".quarantined"
_OVERDUE = ".overdue"


class Quarantine:
    """`ttl` and `grace` are in seconds. All methods block."""

    def __init__(self, *, data_dir: Path, ttl: float, grace: float) -> None:
        self._data_dir = data_dir
        self._root = data_dir / "quarantine"
        self._ttl = ttl
        self._grace = grace
        self._log = get_log()

    def folders(self) -> list[str]:
        """Return the folders in quarantine, by their path in the data directory."""
        return [str(path.relative_to(self._root)) for path in sorted(self._root.glob("*/*/*"))]

    def path(self, folder: str) -> Path:
        return self._root / folder

    def put(self, folder: str) -> None:
        target = self.path(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        (self._data_dir / folder).rename(target)
        (target / _SINCE).touch()

    def take_back(self, folder: str) -> None:
        """Move a folder to its place for good."""
        target = self._data_dir / folder
        with suppress(FileExistsError):
            make_folder(target.parent)
        give_name(self.path(folder), target)
        for mark in (_SINCE, _OVERDUE):
            (target / mark).unlink(missing_ok=True)

    def overdue(self) -> list[str]:
        """Return what has been here for too long, and note what has been since now."""
        found = []
        for folder in self.folders():
            path, now = self.path(folder), time.time()
            overdue = path / _OVERDUE
            try:
                since = path / _SINCE
                if not since.exists():
                    since.touch()
                if since.stat().st_mtime + self._ttl > now:
                    overdue.unlink(missing_ok=True)  # the clock was ahead
                elif not overdue.exists() or overdue.stat().st_mtime > now:
                    overdue.touch()
                elif overdue.stat().st_mtime + self._grace <= now:
                    found.append(folder)
            except OSError as error:  # tried again the next time
                self._log.error("not_removed", path=str(path), reason=describe(error))
        return found
