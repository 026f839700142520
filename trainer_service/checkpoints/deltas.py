"""Files of a version that are written as what differs from those of another, by the format of
`tandem.weights.delta`.

Nothing is exported twice for it: a tensor is compared, piece by piece, with what the other
version's file has in its place, and a piece in which too much differs is written whole. So a patch
never has more bytes than its file, but for the headers of its pieces.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np

from tandem.errors import LoadFailed
from tandem.telemetry import get_log
from tandem.weights import Checksum, FileEntry, open_base
from tandem.weights.delta import PIECE_BYTES, encode
from tandem.weights.manifest import PATCH_SUFFIX
from trainer_service.checkpoints.storage import HashedFile, Progress


def find_base(path: Path, delta_of: str) -> Path | None:
    """Returns the folder of the whole version that the one to be written at `path` may be a delta
    of; None where it is not there as its manifest has it: then all files are whole."""
    if not delta_of:
        return None
    try:
        return open_base(path, delta_of, checksums=False)
    except LoadFailed as error:
        get_log().warning("no_delta", delta_of=delta_of, reason=error.message)
        return None


def has_header(file: Path, header: bytes) -> bool:
    """Whether a safetensors file holds the tensors of this header, in the same places."""
    try:
        with file.open("rb") as stream:
            return stream.read(len(header)) == header
    except OSError:
        return False


class PatchedFile:
    """A new file, given in the order of its bytes, of which only what differs from `base` is
    written. Raises `OSError`."""

    def __init__(self, path: Path, *, base: Path, progress: Progress) -> None:
        self.name = path.name
        self._base = base.open("rb")
        self._patch = HashedFile(path.with_name(path.name + PATCH_SUFFIX), progress=progress)
        self._checksum = Checksum()
        self._place = 0
        self._old = np.empty(PIECE_BYTES, np.uint8)

    def write(self, content: bytes | memoryview) -> int:
        """Take the header, or one tensor."""
        whole = np.frombuffer(content, np.uint8)
        for start in range(0, whole.size, PIECE_BYTES):
            new = whole[start : start + PIECE_BYTES]
            old = self._old[: new.size]
            if self._base.readinto(old.data) != old.size:
                raise OSError(errno.EIO, os.strerror(errno.EIO), self._base.name)
            for part in encode(old, new, start=self._place):
                self._patch.write(part)
            self._checksum.update(new.data)
            self._place += new.size
        return whole.size

    def sync(self) -> None:
        self._patch.sync()

    def close(self) -> None:
        self._base.close()
        self._patch.close()

    def entry(self) -> FileEntry:
        """Of the file that the patch makes."""
        return self._checksum.entry(self.name)

    def patch_entry(self) -> FileEntry:
        return self._patch.entry()
