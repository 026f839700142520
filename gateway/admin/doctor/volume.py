"""Checks of a volume that several hosts mount: writes, locks, renames and other hosts' renames.

With `peers`, as many pods run these checks at once, each on its own node. Each pod looks for the
files that the other pods renamed."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gateway.admin.doctor.check import Check, gib
from tandem.weights.store import fsync_path

_PAUSE = 0.5
_LAST = 15.0


def check_volume(
    folder: Path, *, name: str, peers: int = 1, meeting: str = "alone", patience: float = 300.0
) -> Iterator[Check]:
    """`name` is this pod's. The peers meet in a folder named after their `meeting`. Each waits for
    the others for at most `patience` seconds."""
    place = folder / f".volume-check-{meeting}"
    try:
        free = shutil.disk_usage(folder).free
        place.mkdir(mode=0o700, exist_ok=True)
        yield Check("volume", f"{gib(free)} free", f"{folder} can be written")
        with (place / f".{name}-lock").open("wb") as file:
            Path(file.name).unlink()
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield Check("locks", "work", "they keep a gateway of another installation away")
        _rename(place, name, "here")
        yield Check("rename", "works", "a file was written, synced and renamed")
        if peers > 1:
            yield _meet(place, name, peers=peers, patience=patience)
    except OSError as error:
        about = f"{error.strerror} by user {os.getuid()}: {error.filename or folder}"
        yield Check("volume", str(folder), about, "problem")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _rename(place: Path, name: str, stage: str) -> None:
    partial = place / f".{name}.{stage}"
    partial.write_bytes(name.encode())
    fsync_path(partial)
    partial.rename(place / f"{name}.{stage}")
    fsync_path(place)


def _meet(place: Path, name: str, *, peers: int, patience: float) -> Check:
    """Wait for the files of all peers. Then wait briefly until each peer saw all files."""
    seen = _wait_for(peers, place, ("here", "done"), seconds=patience)
    if len(seen) < peers:
        missing = f"{len(seen)} of {peers} after {patience:g} s"
        about = "renamed files of another host are not seen here: check that it is one volume"
        return Check("peers", missing, about, "problem")
    _rename(place, name, "done")
    with suppress(FileNotFoundError):  # the last peer has removed the folder
        _wait_for(peers, place, ("done",), seconds=_LAST)
    return Check("peers", ", ".join(sorted(seen)), "see each other's files")


def _wait_for(peers: int, place: Path, stages: tuple[str, ...], *, seconds: float) -> set[str]:
    until = time.monotonic() + seconds
    while len(seen := _seen(place, stages)) < peers and time.monotonic() < until:
        time.sleep(_PAUSE)
    return seen


def _seen(place: Path, stages: tuple[str, ...]) -> set[str]:
    seen = set()
    for entry in place.iterdir():
        name, _, stage = entry.name.rpartition(".")
        if stage in stages and not name.startswith("."):
            with suppress(FileNotFoundError):  # its peer has renamed it
                if entry.read_bytes() == name.encode():
                    seen.add(name)
    return seen
