"""Free space, failed writes, hashed files, and ranks that agree on the result."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeVar

import torch
import torch.distributed as dist

from tandem.errors import PublishFailed, ServerError, StorageFull, TandemError, from_type
from tandem.weights import Checksum, FileEntry
from trainer_service.compute.control_group import ControlGroup

if TYPE_CHECKING:
    from torch import Tensor

Result = TypeVar("Result")

FILE_BYTES = 2**30
"""The most bytes of one file, unless a single tensor has more."""
STALLED_AFTER = 300.0
"""Seconds without progress on any rank, after which the disk counts as failed."""
_BEAT = 1.0
_PIECE = 8 * 2**20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def storage_error(error: OSError, *, what: str, needed: int) -> ServerError:
    """`StorageFull` for a full disk or quota, else `PublishFailed`. `needed` is in bytes, 0 if
    unknown."""
    if error.errno in _FULL:
        return _full(what=what, needed=needed, free="and too few are free")
    return PublishFailed(
        f"{what} could not be written: {error}; nothing of it is left, so try again"
    )


def check_free_space(path: Path, *, what: str, needed: int) -> None:
    """Raise `StorageFull` if `needed` bytes do not fit."""
    free = shutil.disk_usage(_existing(path)).free
    if free < needed:
        raise _full(what=what, needed=needed, free=f"{free} are free")


def _full(*, what: str, needed: int, free: str) -> StorageFull:
    size = f"about {needed} bytes are needed for it, " if needed else ""
    return StorageFull(
        f"the disk is full: {what} could not be written; {size}{free}. Nothing of it is left; try "
        "again when there is room"
    )


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def agree(
    control: ControlGroup,
    write: Callable[[], list[dict[str, str | int]]],
    *,
    what: str,
    needed: int,
) -> list[dict[str, str | int]]:
    """Run `write` on every rank. Rank 0 gets all results, other ranks their own.

    A failed rank reports its error instead, and rank 0 raises the first one."""
    mine: list[dict[str, str | int]] = []
    try:
        report: dict[str, object] = {"entries": (mine := write())}
    except (OSError, TandemError) as error:
        failure: TandemError = (
            storage_error(error, what=what, needed=needed) if isinstance(error, OSError) else error
        )
        report = {"type": failure.type, "message": f"rank {control.rank}: {failure.message}"}
    reports: Sequence[dict[str, object]] = [
        json.loads(part) for part in control.gather(json.dumps(report).encode())
    ]
    entries: list[dict[str, str | int]] = []
    for part in reports:
        if "type" in part:
            raise from_type(str(part["type"]), str(part["message"]))
        entries.extend(part["entries"])  # type: ignore[arg-type]
    return entries if control.rank == 0 else mine


# --- Writing ------------------------------------------------------------------------------------


class Counted(Protocol):
    @property
    def bytes(self) -> int: ...


class ByteCount:
    def __init__(self) -> None:
        self.bytes = 0


class HashedFile:
    def __init__(self, path: Path, *, progress: ByteCount) -> None:
        self.name = path.name
        self._file: BinaryIO = path.open("xb")
        self._checksum = Checksum()
        self._progress = progress

    def write(self, content: bytes | memoryview) -> int:
        whole = memoryview(content)
        assert whole.itemsize == 1
        for start in range(0, len(whole), _PIECE):
            piece = whole[start : start + _PIECE]
            self._file.write(piece)
            self._checksum.update(piece)
            self._progress.bytes += len(piece)
        return len(whole)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def show(self) -> None:
        """Let all hosts read the written bytes before they are durable. The file stays open.

        An NFS client sends its pages to the server when any descriptor of a file is closed."""
        self._file.flush()
        os.close(os.dup(self._file.fileno()))

    def fileno(self) -> int:
        return self._file.fileno()

    def sync(self) -> None:
        """Sync through this file, because a newly opened one would not report its failed writes."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def entry(self) -> FileEntry:
        return self._checksum.entry(self.name)


def together(
    group: dist.ProcessGroup | None,
    work: Callable[[], Result],
    *,
    progress: Counted,
    stalled_after: float = STALLED_AFTER,
) -> Result:
    """Return the result of `work` after all ranks of the group have finished theirs.

    Each rank works in a thread, and the ranks exchange their progress every second. So no
    collective waits for a disk, and a rank's death is noticed at once.

    Raises the error of `work`, after the others have finished too. Raises `OSError` on every rank
    if none makes progress for `stalled_after` seconds. The thread may then still hang."""
    return end_together(group, begin(work), progress=progress, stalled_after=stalled_after)


def begin(work: Callable[[], Result]) -> Future[Result]:
    future: Future[Result] = Future()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    threading.Thread(target=_carry_out, args=(future, work, gpu), name="disk", daemon=True).start()
    return future


def end_together(
    group: dist.ProcessGroup | None,
    future: Future[Result],
    *,
    progress: Counted,
    stalled_after: float = STALLED_AFTER,
) -> Result:
    """As `together`, for work that each rank has begun."""
    seen, since = -1, time.monotonic()
    while True:
        wait_for([future], timeout=_BEAT)
        # Only rank 0's clock counts, so that all ranks give up or none does.
        first = group is None or dist.get_rank(group) == 0
        late = first and time.monotonic() - since > stalled_after
        busy, everywhere, stalled = _sum(group, not future.done(), progress.bytes, late)
        if not busy:
            return future.result()
        if stalled:
            raise OSError(
                errno.ETIMEDOUT, f"the disk of {busy} ranks has stood still for {stalled_after:g} s"
            )
        if everywhere != seen:
            seen, since = everywhere, time.monotonic()


def _sum(group: dist.ProcessGroup | None, *numbers: int) -> list[int]:
    if group is None:
        return [*numbers]
    total: Tensor = torch.tensor(numbers, dtype=torch.int64)
    dist.all_reduce(total, group=group)
    return [int(number) for number in total.tolist()]


def _carry_out(future: Future[Result], work: Callable[[], Result], gpu: int | None) -> None:
    try:
        if gpu is not None:
            torch.cuda.set_device(gpu)  # each thread has its own
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 (raised by the waiting thread)
        future.set_exception(error)
