"""The files of a run's record: `DATA/runs/RUN/record/{metrics,rollouts}-EPOCH-N.jsonl`.

One gateway writes, and each starts segments of its own. Lines are on the disk before `append`
returns. A line without its end was torn by a crash and is ignored. Later lines stay readable,
because the append after a failure begins a segment."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from gateway.identifiers import run_folder_name
from tandem.weights.store import fsync_path, make_folder

Kind = Literal["metrics", "rollouts"]
_NAME = re.compile(r"(metrics|rollouts)-([0-9]{1,18})-([0-9]{1,9})\.jsonl")
_SEGMENT_BYTES = 128 * 2**20
_READ_BYTES = 2**20


class Place(NamedTuple):
    """A position in the segments of one kind. Places compare in the order of writing."""

    epoch: int = 0
    number: int = 0
    offset: int = 0

    @classmethod
    def of_cursor(cls, text: str) -> Place:
        return cls(*map(int, text.split("-")))

    @property
    def cursor(self) -> str:
        """The place as text for clients."""
        return "-".join(map(str, self))

    def file(self, kind: Kind) -> str:
        return f"{kind}-{self.epoch}-{self.number}.jsonl"


def place_in(file: str, offset: int) -> Place:
    """Return the place of a file's name, and the beginning for another name."""
    match = _NAME.fullmatch(file)
    return Place(int(match[2]), int(match[3]), offset) if match else Place()


def record_folder(data_dir: Path, run_id: str) -> Path:
    return data_dir / "runs" / run_folder_name(run_id) / "record"


def list_segments(folder: Path, kind: Kind) -> list[Place]:
    """Return the beginnings of all segments in the order of writing."""
    with suppress(FileNotFoundError):
        found = [_NAME.fullmatch(path.name) for path in folder.iterdir()]
        return sorted(Place(int(m[2]), int(m[3])) for m in found if m and m[1] == kind)
    return []


def end_of(folder: Path, kind: Kind) -> Place:
    """Return the place behind the last segment's bytes."""
    segments = list_segments(folder, kind)
    if not segments:
        return Place()
    return segments[-1]._replace(offset=(folder / segments[-1].file(kind)).stat().st_size)


def read_lines(
    folder: Path, kind: Kind, start: Place, *, most_bytes: int
) -> Iterator[tuple[list[bytes], Place]]:
    """Yield complete lines from `start` on, and the place behind them, in pieces of about 1 MiB.
    Stop after `most_bytes`. An offset behind a segment means its end."""
    for segment in list_segments(folder, kind):
        if segment[:2] < start[:2]:
            continue
        offset = start.offset if segment[:2] == start[:2] else 0
        with (folder / segment.file(kind)).open("rb") as stream:
            if offset > (size := stream.seek(0, os.SEEK_END)):  # a client's own number
                offset = size
                yield [], segment._replace(offset=offset)
            stream.seek(offset)
            torn = False
            while most_bytes > 0 and not torn and (lines := stream.readlines(_READ_BYTES)):
                if torn := not lines[-1].endswith(b"\n"):
                    del lines[-1]
                size = sum(map(len, lines))
                offset += size
                most_bytes -= size
                yield lines, segment._replace(offset=offset)


@dataclass(eq=False)
class SegmentWriter:
    """Appends to a run's segments of one kind. `epoch` is the gateway's."""

    folder: Path
    kind: Kind
    epoch: int
    _place: Place | None = field(default=None, init=False)
    _newest: Place = field(default=Place(), init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def append(self, content: bytes, anew: bool = False) -> Place:
        """Write whole lines and sync them, `anew` in a new segment. Return their beginning. After
        an `OSError`, the lines are cut off where the disk allows it."""
        with self._lock:  # a cancelled call goes on in its thread
            if anew:
                self._place = None
            return self._append(content)

    def _append(self, content: bytes) -> Place:
        place = self._place or self._next_segment()
        self._place = None
        path = self.folder / place.file(self.kind)
        with path.open("ab", buffering=0) as stream:
            try:
                written = 0
                while written < len(content):
                    written += stream.write(memoryview(content)[written:])
                os.fsync(stream.fileno())
            except OSError:
                stream.truncate(place.offset)
                if place.offset == 0:  # so that repeated failures leave no files
                    path.unlink()
                raise
        if place.offset == 0:  # a killed gateway may have made the folders without a sync
            for folder in (self.folder, *self.folder.parents[:3]):
                fsync_path(folder)
        if place.offset + len(content) < _SEGMENT_BYTES:
            self._place = place._replace(offset=place.offset + len(content))
        return place

    def _next_segment(self) -> Place:
        """Return the beginning of a new last segment. A machine's restart may lower the epoch."""
        if not self.folder.is_dir():
            make_folder(self.folder)
        newest = max(self._newest, *list_segments(self.folder, self.kind), Place())
        after = Place(newest.epoch, newest.number + 1)
        self._newest = Place(self.epoch) if newest.epoch < self.epoch else after
        return self._newest
