"""Records file operations below a folder, and replays them on the simulated disk.

`Recorder` sees the calls that `UnreliableDisk` replaces. A trace is a list of `Operation`, with the
times of one clock. `replay` repeats a trace's operations in the order of their ends, each at its
client, and compares outcomes. An outcome is the error's name, the names in a folder, the digest of
a read file, or "ok"."""

from __future__ import annotations

import builtins
import errno
import gzip
import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import astuple, dataclass
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

from tests.support.unreliable_disk import buffered, flags_of


@dataclass(frozen=True)
class Operation:
    """`path` is relative to the root. `more` is a new name, an open's access or a file's digest.

    `handle` numbers an open file of a client. `name` "restart" is the server's, and `call …` a
    function's whole call, whose outcome is its result."""

    client: str
    began: float
    ended: float
    name: str
    path: str = ""
    more: str = ""
    handle: int = 0
    outcome: object = "ok"


def write_trace(file: Path, operations: Iterable[Operation]) -> None:
    lines = "".join(f"{json.dumps(astuple(each), separators=(',', ':'))}\n" for each in operations)
    file.write_bytes(gzip.compress(lines.encode(), 9, mtime=0))


def read_trace(file: Path) -> list[Operation]:
    content = file.read_bytes()
    text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
    return [Operation(*json.loads(line)) for line in text.splitlines()]


# --- Recording ------------------------------------------------------------------------------------


class Recorder:
    """While it is open, it tells `note` each operation below `root`, from any thread."""

    def __init__(self, root: Path, *, client: str, note: Callable[[Operation], None]) -> None:
        self._root, self._client, self._note = str(root), client, note
        self._handles: dict[int, int] = {}
        self._opened = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Recorder:
        for name, call in _CALLS.items():
            setattr(os, name, self._bound(call))
        io.open = builtins.open = self.open  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        for name in _CALLS:
            setattr(os, name, getattr(_real, name))
        io.open = builtins.open = _real_open

    def _bound(self, call: Callable[..., object]) -> Callable[..., object]:
        return lambda *args, **more: call(self, *args, **more)

    def path(self, path: object, dir_fd: int | None = None) -> str:
        """Return a path below the root, or "" outside of it."""
        if dir_fd is not None:
            path = f"{_path_of(dir_fd)}/{path}"
        if isinstance(path, int):
            path = _path_of(path)
        text = os.fspath(path)  # type: ignore[call-overload]
        if not isinstance(text, str) or not f"{text}/".startswith(f"{self._root}/"):
            return ""
        return text.removeprefix(self._root).strip("/") or "."

    def note(
        self,
        name: str,
        path: str,
        call: Callable[[], object],
        *,
        more: str = "",
        handle: int = 0,
        outcome: Callable[[object], object] = lambda _: "ok",
        outer: float | None = None,
    ) -> object:
        """Do a call, and record it."""
        began, found = time.monotonic() if outer is None else outer, "ok"
        try:
            result = call()
            found = outcome(result)
        except OSError as error:
            found = errno.errorcode.get(error.errno or 0, str(error.errno))
            raise
        finally:
            now = time.monotonic()
            self._note(Operation(self._client, began, now, name, path, more, handle, found))
        return result

    def handle(self, fd: int) -> int:
        with self._lock:
            return self._handles.get(fd, 0)

    # --- The calls --------------------------------------------------------------------------------

    def open(self, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **more):
        fd = file if isinstance(file, int) else None
        if fd is None and not (isinstance(file, str | os.PathLike) and self.path(file)):
            return _real_open(file, mode, buffering, encoding, errors, newline, **more)
        if fd is not None and not self.handle(fd):
            return _real_open(file, mode, buffering, encoding, errors, newline, **more)
        if fd is None:
            fd = os.open(file, flags_of(mode), 0o666)
        raw = _RecordedFile(self, fd, mode.replace("x", "w").translate({98: None, 116: None}))
        return buffered(raw, mode, buffering, encoding, errors, newline)

    def open_fd(self, path, flags, mode=0o777, *, dir_fd=None):
        if not (below := self.path(path, dir_fd)):
            return _real.open(path, flags, mode, dir_fd=dir_fd)
        with self._lock:
            self._opened += 1
            handle = self._opened
        made = bool(flags & os.O_CREAT)

        def call() -> int:
            fd = _real.open(path, flags, mode, dir_fd=dir_fd)
            with self._lock:
                self._handles[fd] = handle
            return fd

        return self.note(
            "create" if made else "open",
            below,
            call,
            more="x" if flags & os.O_EXCL else "",
            handle=handle,
        )

    def close(self, fd):
        self.forget(fd)
        _real.close(fd)

    def forget(self, fd: int) -> None:
        with self._lock:
            self._handles.pop(fd, None)

    def fsync(self, fd):
        fd = fd if isinstance(fd, int) else fd.fileno()
        if not (handle := self.handle(fd)):
            return _real.fsync(fd)
        return self.note("sync", self.path(fd), lambda: _real.fsync(fd), handle=handle)

    def rename(self, source, target, **more):
        if not (old := self.path(source)):
            return _real.rename(source, target, **more)
        call = lambda: _real.rename(source, target, **more)  # noqa: E731
        return self.note("rename", old, call, more=self.path(target))

    def mkdir(self, path, mode=0o777, **more):
        return self._simple("make", path, lambda: _real.mkdir(path, mode, **more))

    def unlink(self, path, *, dir_fd=None):
        return self._simple("remove", path, lambda: _real.unlink(path, dir_fd=dir_fd), dir_fd)

    def rmdir(self, path, *, dir_fd=None):
        return self._simple("rmdir", path, lambda: _real.rmdir(path, dir_fd=dir_fd), dir_fd)

    def stat(self, path, *, dir_fd=None, follow_symlinks=True):
        call = lambda: _real.stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)  # noqa: E731
        return call() if isinstance(path, int) else self._simple("look", path, call, dir_fd)

    def lstat(self, path, *, dir_fd=None):
        return self._simple("look", path, lambda: _real.lstat(path, dir_fd=dir_fd), dir_fd)

    def listdir(self, path="."):
        if isinstance(path, int) or not (below := self.path(path)):
            return _real.listdir(path)
        return self.note("list", below, lambda: _real.listdir(path), outcome=sorted)

    def scandir(self, path="."):
        if isinstance(path, int) or not (below := self.path(path)):
            return _real.scandir(path)

        def call() -> _Entries:
            with _real.scandir(path) as entries:
                return _Entries(entries)

        found = self.note("list", below, call, outcome=lambda each: each.names)
        return found

    def _simple(self, name, path, call, dir_fd=None):
        below = self.path(path, dir_fd)
        return self.note(name, below, call) if below else call()


class _Entries:
    """A whole listing, with the interface of `os.scandir`."""

    def __init__(self, entries: Iterable[os.DirEntry]) -> None:
        found = list(entries)
        self.names = sorted(each.name for each in found)
        self._left = iter(found)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> os.DirEntry:
        return next(self._left)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._left = iter(())


class _RecordedFile(io.FileIO):
    def __init__(self, recorder: Recorder, fd: int, mode: str) -> None:
        super().__init__(fd, mode)
        self._recorder, self._handle = recorder, recorder.handle(fd)
        self._below = recorder.path(fd)
        self._seen, self._count, self._first = blake2b(digest_size=8), 0, 0.0

    def _see(self, content: object) -> None:
        self._first = self._first or time.monotonic()
        self._seen.update(content)
        self._count += len(content)

    def readinto(self, buffer):
        count = self._noted("read", lambda: super(_RecordedFile, self).readinto(buffer))
        self._see(memoryview(buffer).cast("B")[:count])
        return count

    def readall(self):
        content = self._noted("read", super().readall)
        self._see(content)
        return content

    def write(self, content):
        written = self._recorder.note(
            "write",
            self._below,
            lambda: super(_RecordedFile, self).write(content),
            handle=self._handle,
        )
        self._see(memoryview(content).cast("B")[:written])
        return written

    def close(self):
        if self.closed:
            return
        fd, writable = self.fileno(), self.writable()
        self._recorder.forget(fd)
        digest = self._seen.hexdigest()
        if writable:
            self._recorder.note(
                "close", self._below, super().close, more=digest, handle=self._handle
            )
        else:
            super().close()
            if self._count:
                self._recorder.note(
                    *("read", self._below, lambda: None),
                    handle=self._handle,
                    outcome=lambda _: digest,
                    outer=self._first,
                )

    def _noted(self, name: str, call: Callable[[], object]) -> object:
        """Record only a failure: a whole read is recorded at the close."""
        try:
            return call()
        except OSError as error:
            failed = error

            def fail() -> None:
                raise failed

            with suppress(OSError):
                self._recorder.note(name, self._below, fail, handle=self._handle)
            raise


_CALLS: dict[str, Callable[..., object]] = {
    "open": Recorder.open_fd,
    "close": Recorder.close,
    "fsync": Recorder.fsync,
    "rename": Recorder.rename,
    "replace": Recorder.rename,
    "mkdir": Recorder.mkdir,
    "unlink": Recorder.unlink,
    "remove": Recorder.unlink,
    "rmdir": Recorder.rmdir,
    "stat": Recorder.stat,
    "lstat": Recorder.lstat,
    "listdir": Recorder.listdir,
    "scandir": Recorder.scandir,
}
_real = SimpleNamespace(**{name: getattr(os, name) for name in _CALLS})
_real_open = builtins.open


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
