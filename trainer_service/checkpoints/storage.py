"""What publishing and checkpointing share: free space, failed writes, and agreement of ranks."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.errors import PublishFailed, ServerError, StorageFull, from_type
from trainer_service.compute.trainer import ControlGroup

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def storage_error(error: OSError, *, what: str, needed: int) -> ServerError:
    """`StorageFull` for a full disk or quota, else `PublishFailed`; `needed` in bytes, 0 if not
    known."""
    if error.errno in _FULL:
        return _full(what=what, needed=needed, free="and too few are free")
    return PublishFailed(
        f"{what} could not be written: {error}; nothing of it is left, and it can be tried again"
    )


def check_free_space(path: Path, *, what: str, needed: int) -> None:
    """Raises `StorageFull` if `needed` bytes do not fit, before anything is written."""
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
    """Runs `write` on every rank; rank 0 gets what all ranks returned.

    A rank that fails to write reports its error instead, so that all ranks stay in step; rank 0
    then raises that of the first rank that failed. Other ranks return their own entries.
    """
    try:
        report: dict[str, object] = {"entries": (mine := write())}
    except OSError as error:
        mine = []
        failure = storage_error(error, what=what, needed=needed)
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
