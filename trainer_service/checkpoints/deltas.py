"""Files of a version written as differences from another version's files (`tandem.weights.delta`).

A piece with too many differences is written whole, so a patch is hardly larger than its file."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from itertools import islice
from pathlib import Path

import numpy as np

from tandem.errors import LoadFailed
from tandem.telemetry import get_log
from tandem.weights import Checksum, FileEntry, open_base
from tandem.weights.delta import PIECE_BYTES, Bytes, encode
from tandem.weights.manifest import PATCH_SUFFIX
from trainer_service.checkpoints.storage import ByteCount, HashedFile


def find_base(path: Path, delta_of: str) -> Path | None:
    """Return the folder of the whole version that the new one may be a delta of, or None."""
    if not delta_of:
        return None
    try:
        return open_base(path, delta_of, checksums=False)
    except LoadFailed as error:
        get_log().warning("no_delta", delta_of=delta_of, reason=error.message)
        return None


def has_header(file: Path, header: bytes) -> bool:
    """True if a safetensors file has this header."""
    try:
        with file.open("rb") as stream:
            return stream.read(len(header)) == header
    except OSError:
        return False


_AT_ONCE = 2**18
"""A tensor of fewer bytes is compared in the calling thread."""


class PatchedFile:
    """A new file, given in byte order, that writes only its differences from `base`.

    `threads` compare its pieces. Raises `OSError`."""

    def __init__(self, path: Path, *, base: Path, progress: ByteCount, threads: int) -> None:
        self.name = path.name
        self._base = base.open("rb", buffering=0)
        self._patch = HashedFile(path.with_name(path.name + PATCH_SUFFIX), progress=progress)
        self._checksum = Checksum()
        self._place = 0
        self._ahead = 2 * threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compare")
        self._old = threading.local()

    def write(self, content: bytes | memoryview) -> int:
        whole = np.frombuffer(content, np.uint8)
        if whole.size <= _AT_ONCE:
            self._take(whole, self._compare(whole, self._place))
            return whole.size
        pieces = [whole[at : at + PIECE_BYTES] for at in range(0, whole.size, PIECE_BYTES)]
        starts = range(self._place, self._place + whole.size, PIECE_BYTES)
        compared: deque[Future[list[memoryview]]] = deque()
        waiting = zip(pieces, starts, strict=True)
        try:
            for new in pieces:
                for piece in islice(waiting, self._ahead - len(compared)):
                    compared.append(self._pool.submit(self._compare, *piece))
                self._take(new, compared.popleft().result())
        finally:
            wait_for(compared)  # they read the tensor, which is gone afterwards
        return whole.size

    def _take(self, new: Bytes, change: list[memoryview]) -> None:
        for part in change:
            self._patch.write(part)
        self._checksum.update(new.data)
        self._place += new.size

    def _compare(self, new: Bytes, start: int) -> list[memoryview]:
        """Return the change of a piece. Each thread reuses its buffer, because new memory must be
        cleared first."""
        if not hasattr(self._old, "piece"):
            self._old.piece = np.empty(PIECE_BYTES, np.uint8)
        old: Bytes = self._old.piece[: new.size]
        if os.preadv(self._base.fileno(), [old.data], start) != old.size:
            raise OSError(errno.EIO, os.strerror(errno.EIO), self._base.name)
        return encode(old, new, start=start)

    def sync(self) -> None:
        self._patch.sync()

    def close(self) -> None:
        self._pool.shutdown()
        self._base.close()
        self._patch.close()

    def entry(self) -> FileEntry:
        """The entry of the whole file that the patch produces."""
        return self._checksum.entry(self.name)

    def patch_entry(self) -> FileEntry:
        return self._patch.entry()
