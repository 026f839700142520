"""A folder that behaves like NFS or a faulty disk, for unit tests.

While `UnreliableDisk(root)` is open, all Python operations below `root` pass through it: `os`,
`open`, `pathlib`, `shutil` and torch's checkpoints, but not native code. It adds to the real files:

- **Faults.** `strikes(fault)` fails the first possible operation, then the second, and so on.
- **Several hosts**, `at(host)`. For 30 s of `now`, a host believes its last look-up: that a name
  does not exist, where a folder was before a rename, or a file's content before its replacement.
  Opening or listing a folder refreshes its names.
- **Power failures.** `lose_power` removes unsynced changes: contents become zeros, new names
  disappear and renames are undone. Changes lost in a failed sync or close stay lost, even if the
  next sync succeeds."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from threading import RLock
from types import SimpleNamespace
from typing import NamedTuple

LOOKUP_SECONDS = 30.0
_MADE = ("create", "make", "link", "rename")
_WRITES = 2
"""The writes of a file that may fail. A later one equals the second."""


class Fault(Enum):
    """The error's number, and the operations that may fail."""

    FULL = (errno.ENOSPC, *_MADE, "write", "sync", "close")
    LOST = (errno.EIO, "sync", "close")
    STALE = (errno.ESTALE, "read")
    KILL = (0, *_MADE, "write", "sync", "close", "remove")

    @property
    def operations(self) -> tuple[object, ...]:
        return self.value[1:]

    def error(self, path: str) -> OSError:
        return OSError(self.value[0], os.strerror(self.value[0]), path)


class Killed(BaseException):
    """The process is dead. Further operations raise this again."""


@dataclass
class Strike:
    """One run of the tested code. A kill ends its `with` block.

    `hit` is the failed operation, such as `sync /v1/manifest.json`."""

    disk: UnreliableDisk
    fault: Fault
    countdown: int
    hit: str = ""

    def __enter__(self) -> Strike:
        self.disk.strike = self
        return self

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> bool:
        self.disk.strike = None
        return isinstance(error, Killed)

    @property
    def killed(self) -> bool:
        return bool(self.hit) and self.fault is Fault.KILL


class _Name(NamedTuple):
    """A host's belief about a name: its place (None: nowhere) and the end of the belief."""

    place: str | None
    until: float


@dataclass
class _Unsynced:
    """A name in a folder that a power failure removes, or returns to `was`, its place before a
    rename.

    A `lost` one cannot be synced any more. `folder` is an inode."""

    folder: int
    name: str
    was: tuple[int, str] | None
    lost: bool = False


class UnreliableDisk:
    def __init__(self, root: Path) -> None:
        self.now = 0.0
        self.lock = RLock()
        self.strike: Strike | None = None
        self._root = str(root)
        self._replaced = f"{root}-replaced"
        self._host = "host"
        self._believed: defaultdict[str, dict[str, _Name]] = defaultdict(dict)
        self._names: list[_Unsynced] = []
        # By inode, the number of first bytes that survive. Other files survive completely.
        self._safe: dict[int, int] = {}

    def __enter__(self) -> UnreliableDisk:
        for name, call in _CALLS.items():
            setattr(os, name, _bound(self, call))
        io.open = builtins.open = self.open  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        for name in _CALLS:
            setattr(os, name, getattr(_real, name))
        io.open = builtins.open = _real_open

    # --- For tests -----------------------------------------------------------------------------

    def strikes(self, fault: Fault) -> Iterator[Strike]:
        """Yield strikes at the first operation, the second and so on. The last one hits nothing."""
        for nth in count(1):
            yield (strike := self.strike_at(fault, nth))
            if not strike.hit:
                return

    def strike_at(self, fault: Fault, nth: int) -> Strike:
        return Strike(self, fault, nth)

    @contextmanager
    def at(self, host: str) -> Iterator[None]:
        before, self._host = self._host, host
        try:
            yield
        finally:
            self._host = before

    def lose_power(self) -> None:
        """All hosts start afresh."""
        for entry in reversed(self._names):
            places = {_inode(path): path for path in _tree(self._root)}
            folder = places.get(entry.folder)
            if folder is None or not _exists(path := f"{folder}/{entry.name}"):
                continue
            if entry.was is not None and entry.was[0] in places:
                _real.rename(path, f"{places[entry.was[0]]}/{entry.was[1]}")
            else:
                _remove(path)
        for path in _tree(self._root):
            if (safe := self._safe.get(_inode(path))) is not None:
                _lose(path, safe=safe)
        self._names.clear()
        self._safe.clear()
        self._believed.clear()

    # --- Faults -------------------------------------------------------------------------------

    def strikes_now(self, operation: str, path: str) -> bool:
        """Return whether this operation must fail. After a kill, raises `Killed`."""
        strike = self.strike
        if strike is None:
            return False
        if strike.killed:
            raise Killed(strike.hit)
        if strike.hit or operation not in strike.fault.operations:
            return False
        strike.countdown -= 1
        if strike.countdown:
            return False
        strike.hit = f"{operation} {path.removeprefix(self._root)}"
        if strike.fault is Fault.KILL:
            raise Killed(strike.hit)
        return True

    def act(self, operation: str, path: str) -> None:
        if self.strikes_now(operation, path):
            raise self.strike.fault.error(path)

    # --- A host's beliefs ----------------------------------------------------------------------

    def _is_below(self, path: object) -> bool:
        return isinstance(path, str | os.PathLike) and f"{path}/".startswith(f"{self._root}/")

    def _find(self, path: str, *, new: bool = False) -> str:
        """Return the place of a path for this host. `new`: its last name is about to be made."""
        believed, place, at = self._believed[self._host], self._root, self._root
        parts = [part for part in path.removeprefix(self._root).split("/") if part]
        for part in parts[:-1] if new else parts:
            at = f"{at}/{part}"
            known = believed.get(at)
            if known is None or known.until <= self.now:
                real = f"{place}/{part}" if _exists(f"{place}/{part}") else None
                known = believed[at] = _Name(real, self.now + LOOKUP_SECONDS)
            if known.place is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            place = known.place
        if new:
            believed.pop(path, None)
            place = f"{place}/{parts[-1]}"
        return place

    def _look_again(self, folder: str) -> None:
        """A host does so when it opens the folder. It believes the result until the next time."""
        believed = self._believed[self._host]
        for path in [path for path in believed if path.rpartition("/")[0] == folder]:
            del believed[path]
            with suppress(FileNotFoundError):
                self._find(path)

    def _move(self, source: str, target: str) -> None:
        """Other hosts still believe in the places that they know."""
        if _exists(target) and not _is_folder(target):
            kept = f"{self._replaced}-{_inode(target)}"
            _real.link(target, kept)
            self._lead_elsewhere(target, kept)
        _real.rename(source, target)
        self._lead_elsewhere(source, target)
        own = self._believed[self._host]
        for path in [path for path in own if path.startswith(f"{target}/")]:
            del own[path]  # of an earlier folder with the name

    def _lead_elsewhere(self, source: str, target: str) -> None:
        for host, believed in self._believed.items():
            for path, known in tuple(believed.items()):
                if known.place is None or not f"{known.place}/".startswith(f"{source}/"):
                    continue
                if host == self._host:
                    del believed[path]
                else:
                    place = target + known.place.removeprefix(source)
                    believed[path] = _Name(place, known.until)

    # --- Durability ----------------------------------------------------------------------------

    def _note_name(self, path: str, *, was: tuple[int, str] | None = None) -> None:
        self._forget_name(path)
        folder, _, name = path.rpartition("/")
        self._names.append(_Unsynced(_inode(folder), name, was))

    def _forget_name(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        gone = (_inode(folder), name)
        self._names = [entry for entry in self._names if (entry.folder, entry.name) != gone]

    def _forget_content(self, path: str) -> None:
        """Forget an inode, because its number is used again."""
        if _is_folder(path) or _real.lstat(path).st_nlink == 1:
            inode = _inode(path)
            self._safe.pop(inode, None)
            self._names = [entry for entry in self._names if entry.folder != inode]

    def lose_unsynced(self, fd: int) -> None:
        """Lose unsynced changes, like a disk that fails to write."""
        inode = os.fstat(fd).st_ino
        for entry in self._names:
            entry.lost = entry.lost or entry.folder == inode
        if (safe := self._safe.pop(inode, None)) is not None:
            _lose(f"/proc/self/fd/{fd}", safe=safe)

    def note_change(self, fd: int) -> None:
        inode, size = os.fstat(fd).st_ino, os.fstat(fd).st_size
        self._safe[inode] = min(size, self._safe.get(inode, size))

    # --- The calls ----------------------------------------------------------------------------

    def _path(self, path: object, dir_fd: int | None = None) -> str:
        """Return "" outside of the root."""
        if dir_fd is not None:
            path = f"{_path_of(dir_fd)}/{path}"
        return os.fspath(path) if self._is_below(path) else ""  # type: ignore[call-overload]

    def open(self, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **more):
        """Replaces `builtins.open`."""
        path = _path_of(file) if isinstance(file, int) else self._path(file)
        if not self._is_below(path):
            return _real_open(file, mode, buffering, encoding, errors, newline, **more)
        fd = file if isinstance(file, int) else os.open(file, flags_of(mode), 0o666)
        raw = _File(self, fd, path, mode.replace("x", "w").translate({98: None, 116: None}))
        return buffered(raw, mode, buffering, encoding, errors, newline)

    def open_fd(self, path, flags, mode=0o777, *, dir_fd=None):
        if not (below := self._path(path, dir_fd)):
            return _real.open(path, flags, mode, dir_fd=dir_fd)
        self.act("look", below)
        if not flags & os.O_CREAT:
            place = self._find(below)
            if _is_folder(place):
                self._look_again(below)
            fd = _real.open(place, flags, mode)
        else:
            place = self._find(below, new=True)
            if is_new := not _exists(place):
                self.act("create", below)
            fd = _real.open(place, flags, mode)
            if is_new:
                self._note_name(place)
        if flags & (os.O_CREAT | os.O_TRUNC):
            self.note_change(fd)
        return fd

    def fsync(self, fd):
        fd = fd if isinstance(fd, int) else fd.fileno()
        if self._is_below(path := _path_of(fd)):
            if self.strikes_now("sync", path):
                self.lose_unsynced(fd)
                raise self.strike.fault.error(path)
            inode = os.fstat(fd).st_ino
            self._names = [entry for entry in self._names if entry.lost or entry.folder != inode]
            self._safe.pop(inode, None)
        _real.fsync(fd)

    def rename(self, source, target, **more):
        if not (old := self._path(source)):
            _real.rename(source, target, **more)
            return
        self.act("rename", new := os.fspath(target))
        old, new = self._find(old), self._find(new, new=True)
        was = (_inode(old.rpartition("/")[0]), old.rpartition("/")[2])
        self._move(old, new)
        self._names = [entry for entry in self._names if (entry.folder, entry.name) != was]
        self._note_name(new, was=was)

    def mkdir(self, path, mode=0o777, **more):
        if not (below := self._path(path)):
            _real.mkdir(path, mode, **more)
            return
        place = self._find(below, new=True)
        if not _exists(place):
            self.act("make", below)
        _real.mkdir(place, mode)
        self._note_name(place)

    def link(self, source, target, **more):
        if not (below := self._path(target)):
            _real.link(source, target, **more)
            return
        self.act("link", below)
        _real.link(self._find(os.fspath(source)), place := self._find(below, new=True), **more)
        self._note_name(place)

    def unlink(self, path, *, dir_fd=None, call=os.unlink):
        if not (below := self._path(path, dir_fd)):
            call(path, dir_fd=dir_fd)
            return
        self.act("remove", below)
        place = self._find(below)
        if _exists(place) and not (_is_folder(place) and _real.listdir(place)):
            self._forget_name(place)
            self._forget_content(place)
        call(place)
        self._believed[self._host].pop(below, None)

    def rmdir(self, path, *, dir_fd=None):
        self.unlink(path, dir_fd=dir_fd, call=_real.rmdir)

    def stat(self, path, *, dir_fd=None, call=os.stat, **more):
        if not (below := self._path(path, dir_fd)):
            return call(path, dir_fd=dir_fd, **more)
        self.act("look", below)
        return call(self._find(below), **more)

    def lstat(self, path, *, dir_fd=None):
        return self.stat(path, dir_fd=dir_fd, call=_real.lstat)

    def chmod(self, path, mode, **more):
        _real.chmod(self._find(below) if (below := self._path(path)) else path, mode, **more)

    def utime(self, path, *args, **more):
        _real.utime(self._find(below) if (below := self._path(path)) else path, *args, **more)

    def listdir(self, path=".", *, call=os.listdir):
        if isinstance(path, int) or not (below := self._path(path)):
            return call(path)
        self.act("look", below)
        place = self._find(below)
        self._look_again(below)
        return call(place)

    def scandir(self, path="."):
        return self.listdir(path, call=_real.scandir)


class _File(io.FileIO):
    def __init__(self, disk: UnreliableDisk, fd: int, path: str, mode: str) -> None:
        super().__init__(fd, mode)
        self._disk, self._path, self._stale, self._writes = disk, path, False, 0

    def _check_read(self) -> None:
        """A stale file stays stale until it is opened again."""
        self._stale = self._stale or self._disk.strikes_now("read", self._path)
        if self._stale:
            raise Fault.STALE.error(self._path)

    def readinto(self, buffer):
        self._check_read()
        return super().readinto(buffer)

    def readall(self):
        self._check_read()
        return super().readall()

    def write(self, content):
        if self._is_dead():
            return len(content)  # the rest of the process's buffers
        self._disk.note_change(self.fileno())
        self._writes += 1
        if self._writes <= _WRITES and self._disk.strikes_now("write", self._path):
            super().write(bytes(content)[: len(content) // 2])
            raise self._disk.strike.fault.error(self._path)
        return super().write(content)

    def close(self):
        if self.closed:
            return
        try:
            written = self.writable() and not self._is_dead()
            if written and self._disk.strikes_now("close", self._path):
                self._disk.lose_unsynced(self.fileno())
                raise self._disk.strike.fault.error(self._path)
        finally:
            super().close()

    def _is_dead(self) -> bool:
        return self._disk.strike is not None and self._disk.strike.killed


_CALLS: dict[str, Callable[..., object]] = {
    "open": UnreliableDisk.open_fd,
    "fsync": UnreliableDisk.fsync,
    "rename": UnreliableDisk.rename,
    "replace": UnreliableDisk.rename,
    "mkdir": UnreliableDisk.mkdir,
    "link": UnreliableDisk.link,
    "unlink": UnreliableDisk.unlink,
    "remove": UnreliableDisk.unlink,
    "rmdir": UnreliableDisk.rmdir,
    "stat": UnreliableDisk.stat,
    "lstat": UnreliableDisk.lstat,
    "chmod": UnreliableDisk.chmod,
    "utime": UnreliableDisk.utime,
    "listdir": UnreliableDisk.listdir,
    "scandir": UnreliableDisk.scandir,
}
_real = SimpleNamespace(**{name: getattr(os, name) for name in _CALLS})
_real_open = builtins.open


def _bound(disk: UnreliableDisk, call: Callable[..., object]) -> Callable[..., object]:
    def locked(*args, **more):
        with disk.lock:
            return call(disk, *args, **more)

    return locked


def buffered(raw: io.FileIO, mode: str, buffering: int, encoding, errors, newline):
    """Return what `open` returns for a raw file."""
    if buffering == 0:
        return raw
    kind = io.BufferedReader if mode.startswith("r") else io.BufferedWriter
    file = (io.BufferedRandom if "+" in mode else kind)(raw)
    return file if "b" in mode else io.TextIOWrapper(file, encoding, errors, newline)


def flags_of(mode: str) -> int:
    access = os.O_RDWR if "+" in mode else os.O_RDONLY if "r" in mode else os.O_WRONLY
    made = {"r": 0, "w": os.O_CREAT | os.O_TRUNC, "x": os.O_CREAT | os.O_EXCL}
    made["a"] = os.O_CREAT | os.O_APPEND
    return access | made[mode[0]] | os.O_CLOEXEC


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115


def _exists(path: str) -> bool:
    try:
        _real.lstat(path)
    except OSError:
        return False
    return True


def _is_folder(path: str) -> bool:
    return _exists(path) and (_real.lstat(path).st_mode & 0o170000) == 0o040000


def _inode(path: str) -> int:
    return _real.lstat(path).st_ino


def _tree(root: str) -> list[str]:
    found = [root]
    for path in found:
        if _is_folder(path):
            found += [f"{path}/{name}" for name in _real.listdir(path)]
    return found


def _remove(path: str) -> None:
    for each in reversed(_tree(path)):
        (_real.rmdir if _is_folder(each) else _real.unlink)(each)


def _lose(path: str, *, safe: int) -> None:
    """Replace the bytes after the first `safe` ones by zeros."""
    size = _real.stat(path).st_size
    os.truncate(path, safe)
    os.truncate(path, size)
