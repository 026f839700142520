"""What a volume does that several hosts mount, for `tandem doctor --volume`, run in a pod of it.

Everything that Tandem keeps there is written under a name that nobody reads, and renamed. With
`peers`, as many pods run this at once, on nodes of their own, and each looks for what the others
have renamed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from gateway.doctor import Finding
from tandem.weights.store import fsync_path

_PAUSE = 0.5
_LAST = 15.0


@dataclass(frozen=True, kw_only=True)
class VolumeDoctor:
    """`name` is this pod's. The peers meet in a folder that is named after their `meeting`, for
    which each waits up to `patience` seconds."""

    folder: Path
    name: str
    peers: int = 1
    meeting: str = "alone"
    patience: float = 300.0

    def examine(self) -> list[Finding]:
        place = self.folder / f".volume-check-{self.meeting}"
        try:
            return list(self._examine(place))
        except OSError as error:
            about = f"{error.strerror} by user {os.getuid()}: {error.filename or self.folder}"
            return [Finding("volume", str(self.folder), about, level="problem")]
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _examine(self, place: Path) -> Iterator[Finding]:
        free = shutil.disk_usage(self.folder).free
        place.mkdir(mode=0o700, exist_ok=True)
        yield Finding("volume", f"{free / 2**30:.1f} GiB free", f"{self.folder} can be written")
        with (place / f".{self.name}-lock").open("wb") as file:
            Path(file.name).unlink()
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield Finding("locks", "there", "which keep a gateway of another installation away")
        self._rename(place, "here")
        yield Finding("rename", "there", "a file was written, synced, and got its name")
        if self.peers > 1:
            yield self._meet(place)

    def _rename(self, place: Path, stage: str) -> None:
        partial = place / f".{self.name}.{stage}"
        partial.write_bytes(self.name.encode())
        fsync_path(partial)
        partial.rename(place / f"{self.name}.{stage}")
        fsync_path(place)

    def _meet(self, place: Path) -> Finding:
        """Wait until the files of all peers are seen; then, not long, until each has seen them."""
        seen = self._await(place, ("here", "done"), seconds=self.patience)
        if len(seen) < self.peers:
            missing = f"{len(seen)} of {self.peers} after {self.patience:g} s"
            about = "what is renamed elsewhere is not seen here: see whether it is one volume"
            return Finding("peers", missing, about, level="problem")
        self._rename(place, "done")
        with suppress(FileNotFoundError):  # the last one has removed it
            self._await(place, ("done",), seconds=_LAST)
        return Finding("peers", ", ".join(sorted(seen)), "see each other's files")

    def _await(self, place: Path, stages: tuple[str, ...], *, seconds: float) -> set[str]:
        until = time.monotonic() + seconds
        while len(seen := self._seen(place, stages)) < self.peers and time.monotonic() < until:
            time.sleep(_PAUSE)
        return seen

    def _seen(self, place: Path, stages: tuple[str, ...]) -> set[str]:
        """Return whose files a listing shows, and whose content is right."""
        seen = set()
        for entry in place.iterdir():
            name, _, stage = entry.name.rpartition(".")
            if stage in stages and not name.startswith("."):
                with suppress(FileNotFoundError):  # it has got its next name
                    if entry.read_bytes() == name.encode():
                        seen.add(name)
        return seen


def main() -> int:
    request = orjson.loads(sys.stdin.buffer.read())
    doctor = VolumeDoctor(
        folder=Path(request["volume"]),
        name=socket.gethostname(),
        peers=request["peers"],
        meeting=request["meeting"],
    )
    findings = [asdict(each) for each in doctor.examine()]
    sys.stdout.buffer.write(orjson.dumps({"findings": findings}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
