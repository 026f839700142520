"""Replays recorded file operations (`file_trace`) on the simulated disk, and compares outcomes.

Operations are repeated in the order of their ends, each at its client. Where outcomes differ, a
fresh client tells the truth:

- The recorded one is true: the simulated client was staler than the kernel's, which is allowed.
- The recorded one is not true: the simulator is too kind, which is a fault of the simulator.

Operations on a file that only the staler client could not open count as staler too."""

from __future__ import annotations

import errno
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.file_trace import Operation
from tests.support.unreliable_disk import UnreliableDisk

_CHANGES = ("make", "create", "rename", "remove", "rmdir")
_SEES = ("look", "list", "open")
_UNOPENED = "never opened"
_CLOCK_ERROR = 0.01
"""Seconds by which the clients' clocks may differ. Longer than measured."""


@dataclass
class Replayed:
    """Counts of operations. A raced one happened during a change of its own path by another."""

    agreed: int = 0
    raced: int = 0
    staler: list[tuple[Operation, object]] = field(default_factory=list)
    disagreed: list[tuple[Operation, object]] = field(default_factory=list)


class Replay:
    """`disk` is open and empty. A file's content is its digest instead of the recorded bytes."""

    def __init__(self, disk: UnreliableDisk, root: Path, operations: Sequence[Operation]) -> None:
        self._disk, self._root = disk, root
        self._operations = sorted(operations, key=lambda each: each.ended)
        self._files: dict[tuple[str, int], object] = {}
        self._digests = {(o.client, o.handle): o.more for o in operations if o.name == "close"}
        self._last = {(o.client, o.handle): o for o in self._operations if o.handle}
        self._changes = [each for each in self._operations if each.name in _CHANGES]
        self._ends = [each.ended for each in self._changes]
        self._fresh = 0

    def run(self, *, at_restart: Callable[[Operation], None] = lambda _: None) -> Replayed:
        """A restart of the server changes nothing, because clients write again after it."""
        replayed = Replayed()
        for each in self._operations:
            self._disk.now = each.ended
            if each.name == "restart":
                at_restart(each)
            elif not each.name.startswith("call"):
                truth = self._at_fresh_client(each) if each.name in _SEES else None
                found = self._repeat(each)
                if found == each.outcome:
                    replayed.agreed += 1
                elif self._is_raced(each):
                    replayed.raced += 1
                elif each.outcome == truth or found == _UNOPENED:
                    replayed.staler.append((each, found))
                else:
                    replayed.disagreed.append((each, found))
        return replayed

    # --- One operation ----------------------------------------------------------------------------

    def _repeat(self, operation: Operation) -> object:
        key = (operation.client, operation.handle)
        try:
            with self._disk.at(operation.client):
                return _outcome(lambda: self._do(operation))
        finally:
            if self._last.get(key) is operation and (file := self._files.pop(key, None)):
                os.close(file) if isinstance(file, int) else file.close()

    def _do(self, operation: Operation) -> object:
        path, key = self._root / operation.path, (operation.client, operation.handle)
        match operation.name:
            case "make":
                path.mkdir()
            case "rename":
                path.rename(self._root / operation.more)
            case "remove":
                path.unlink()
            case "rmdir":
                path.rmdir()
            case "open":
                self._files[key] = os.open(path, os.O_RDONLY)
            case "create":
                self._files[key] = path.open("xb" if operation.more else "wb", buffering=0)
            case "write":
                if not self._files[key].tell():
                    self._files[key].write(self._digests[key].encode())
            case "sync":
                os.fsync(self._files[key])
            case "close":
                self._files[key].close()
            case "read":
                return os.pread(self._files[key], 100, 0).decode()
            case _:
                return self._see(operation)
        return "ok"

    def _see(self, operation: Operation) -> object:
        path = self._root / operation.path
        if operation.name == "list":
            return sorted(each.name for each in path.iterdir())
        if operation.name == "open":
            os.close(os.open(path, os.O_RDONLY))
        else:
            path.lstat()
        return "ok"

    def _at_fresh_client(self, operation: Operation) -> object:
        self._fresh += 1
        with self._disk.at(f"fresh {self._fresh}"):
            return _outcome(lambda: self._see(operation))

    # --- Races ------------------------------------------------------------------------------------

    def _is_raced(self, operation: Operation) -> bool:
        first = bisect_left(self._ends, operation.began - _CLOCK_ERROR)
        for change in self._changes[first:]:
            overlaps = change.began <= operation.ended + _CLOCK_ERROR
            if change is not operation and overlaps and _concerns(change, operation):
                return True
        return False


def _concerns(change: Operation, operation: Operation) -> bool:
    names = [change.path, *([change.more] if change.name == "rename" else ())]
    if operation.name in ("list", "rmdir"):
        names += [str(Path(name).parent) for name in names]
    paths = [operation.path, *([operation.more] if operation.name == "rename" else ())]
    return any(f"{path}/".startswith(f"{name}/") for path in paths for name in names)


def _outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    except KeyError:
        return _UNOPENED
