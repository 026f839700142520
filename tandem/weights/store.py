"""The directory of weight versions: publish, verify, remove.

A version is `weights/RUN/vNNNNNN-RANDOM/` in the data directory, where RUN is the run id with `_`
for `:`. While it is written, it is `weights/RUN/.partial-vNNNNNN-RANDOM/`. Its name is
`RUN_ID/vNNNNNN-RANDOM`. Names are never reused, because an NFS client may show a replaced file 30 s
late. Nothing here searches for the newest version. Checkpoints and snapshots are written with these
functions too.

After an `OSError` from a write, sync or close, the file is never written again, because the next
sync may wrongly succeed. The folder is removed, and a retry writes another."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from tandem.errors import LoadFailed, describe, without_paths
from tandem.weights.manifest import MANIFEST_NAME, FileEntry, Manifest, checksum_file

_PARTIAL_PREFIX = ".partial-"
_SYNCS_AT_ONCE = 16
MOST_RECORD_BYTES = 16 * 2**20
"""The limit of a manifest or another record: enough for 100,000 tensors."""
_NOT_SEEN = frozenset({errno.ENOENT, errno.ESTALE})

Item = TypeVar("Item")
Result = TypeVar("Result")


def new_version_name(*, run_id: str, number: int, suffix: str = "") -> str:
    """Return a new name, such as `s-ab12:train:0/v000003-9f2c41d0`. Without `suffix` its end is
    random."""
    return f"{run_id}/v{number:06d}-{suffix or secrets.token_hex(4)}"


def version_number(name: str) -> int:
    """Return 3 for `s-ab12:train:0/v000003-9f2c41d0`."""
    return int(name.rpartition("/v")[2].partition("-")[0])


def version_path(data_dir: Path, name: str) -> Path:
    """Return a version's directory: `DATA/weights/s-ab12_train_0/v000003-9f2c41d0`."""
    run_id, _, leaf = name.rpartition("/")
    return data_dir / "weights" / run_id.replace(":", "_") / leaf


def fsync_path(path: Path) -> None:
    """Make the content of a file or directory survive a power failure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_at_once(syncs: Iterable[Callable[[], None]]) -> None:
    """Call all `syncs` at once, because a disk handles simultaneous syncs together.

    Raises the first error."""
    with ThreadPoolExecutor(_SYNCS_AT_ONCE) as pool:
        for _ in pool.map(lambda sync: sync(), syncs):
            pass


def fsync_paths(paths: Iterable[Path]) -> None:
    sync_at_once(partial(fsync_path, path) for path in paths)


def write_synced(file: Path, content: bytes) -> None:
    """The file's name is durable once its folder is synced."""
    with file.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Make a folder and its parents durably. After an `OSError`, none was made."""
    missing = [path, *(parent for parent in path.parents if not parent.exists())]
    try:
        path.mkdir(mode=mode, parents=True)
        for folder in missing:
            fsync_path(folder.parent)
    except FileExistsError:
        raise
    except OSError:
        for folder in missing:
            with suppress(OSError):  # not made, or in use already
                folder.rmdir()
        raise


def give_name(folder: Path, final: Path, *, unsynced: Sequence[Path] = ()) -> None:
    """Rename a folder durably. After an `OSError`, the final name does not exist.

    The folder's files must be synced, except those in `unsynced`."""
    fsync_paths([*unsynced, folder])
    folder.rename(final)
    try:
        sync_name(final)
    except OSError:
        with suppress(OSError):
            final.rename(folder)
        raise


def sync_name(path: Path) -> None:
    """Make the name of `DATA/KIND/RUN/NAME` durable, after another process may have failed to.

    The parents' names are synced too: that process may have made them."""
    fsync_paths(path.parents[:3])


def read_again(read: Callable[[Path], Result], file: Path) -> Result:
    """Return `read(file)`. A missing or stale file is tried once more.

    An NFS client caches for 30 s that a name does not exist, and after a restart of the server its
    open files are stale. Opening the parent folders makes the client ask again."""
    try:
        return read(file)
    except OSError as error:
        if error.errno not in _NOT_SEEN:
            raise
    for folder in reversed(file.parents[:4]):  # as far up as a name can be new
        with suppress(OSError), os.scandir(folder) as entries:
            next(entries, None)
    return read(file)


class PartialVersion:
    """A version being written. All ranks may write files into `path`, and one rank commits.

    Use: `version = PartialVersion(final)`, `version.create()`, write into `version.path`,
    `version.commit(manifest)`. After any failure call `discard()`."""

    def __init__(self, final: Path) -> None:
        self.final = final
        self.path = final.parent / f"{_PARTIAL_PREFIX}{final.name}"

    def create(self) -> None:
        """Make the partial directory. It need not survive a power failure."""
        if not self.path.parent.is_dir():
            make_folder(self.path.parent)
        self.path.mkdir()

    def commit(self, manifest: Manifest, *, unsynced: Sequence[Path] = ()) -> None:
        """Write the manifest, sync everything, and give the version its name.

        Writers have synced their files, except those in `unsynced`. After an `OSError`, the version
        does not have its name."""
        file = self._write_manifest(manifest)
        give_name(self.path, self.final, unsynced=[*unsynced, file])

    def commit_early(self, manifest: Manifest) -> None:
        """Write the manifest and give the version its name, without a sync.

        A power failure may then leave damaged files under the name, until `make_durable`."""
        self._write_manifest(manifest)
        self.path.rename(self.final)

    def make_durable(self, syncs: Iterable[Callable[[], None]]) -> None:
        """Complete `commit_early` by the `syncs` of the files, and those of manifest and names.

        After an `OSError`, the version is gone. Its manifest goes first, before the other syncs
        end: if this process is killed then, another one does not take the version for whole."""
        manifest, failed = self.final / MANIFEST_NAME, list[OSError]()

        def sync(each: Callable[[], None]) -> None:
            try:
                each()
            except OSError as error:
                failed.append(error)
                manifest.unlink(missing_ok=True)

        every: list[Callable[[], None]] = [*syncs]
        names = [manifest, self.final, *self.final.parents[:3]]
        every += [partial(fsync_path, name) for name in names]
        sync_at_once([partial(sync, each) for each in every])
        if failed:
            shutil.rmtree(self.final, ignore_errors=True)
            raise failed[0]

    def _write_manifest(self, manifest: Manifest) -> Path:
        file = self.path / MANIFEST_NAME
        with file.open("xb") as stream:
            stream.write(manifest.model_dump_json(indent=1).encode())
        return file

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def read_record(file: Path) -> bytes:
    """Return the content of a small file beside weights. Retries like `read_again`.

    Raises `OSError` if it exceeds `MOST_RECORD_BYTES`, or is no regular file: anybody may have
    written it."""
    return read_again(_read_record, file)


def _read_record(file: Path) -> bytes:
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as stream:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{file.name} is not a plain file")
        if found.st_size > MOST_RECORD_BYTES:
            raise OSError(f"{file.name} has more than {MOST_RECORD_BYTES} bytes")
        return stream.read(MOST_RECORD_BYTES)


def check_own_file(folder: Path, name: str) -> Path:
    """Return the path of a file that we wrote into a folder.

    Raises `OSError` for a name outside of the folder, for a link, and for other than a regular
    file: only others write these."""
    file = folder / name
    if not name or name != Path(name).name or name == ".." or "\0" in name:
        raise OSError(f"{name[:100]!r} is not the name of a file")
    if folder.is_symlink() or not stat.S_ISREG(file.lstat().st_mode):
        raise OSError(f"{folder.name}/{name} is not a plain file in a folder of its own")
    return file


def open_version(
    path: Path,
    *,
    name: str = "",
    checksums: bool = True,
    go_on: Callable[[], None] = lambda: None,
    threads: int = 1,
) -> Manifest:
    """Read and verify a version's folder before a load.

    `go_on` is called before each block, in each of `threads` threads, and stops the reading by
    raising. Raises `LoadFailed` if the manifest is missing or names another version than `name`.
    Also if a file is missing, has another size, or (with `checksums`) is damaged."""
    try:
        content = read_record(path / MANIFEST_NAME)
        manifest = Manifest.model_validate_json(content)
    except OSError as error:
        why = without_paths(describe(error))
        raise LoadFailed(f"{path.name} is not a published weight version: {why}") from error
    except ValidationError as error:
        raise LoadFailed(f"the manifest of {path.name} is damaged: {error}") from error
    if name and manifest.version != name:
        raise LoadFailed(f"{path.name} holds {manifest.version}, not {name}")

    def check(entry: FileEntry) -> None:
        try:
            _check(path, entry, checksum=checksums, version=manifest.version, go_on=go_on)
        except OSError as error:
            why = without_paths(describe(error))
            raise LoadFailed(f"{manifest.version} lacks {entry.name}: {why}") from error

    in_threads(check, manifest.files, threads=threads)
    return manifest


def in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], *, threads: int
) -> list[Result]:
    """Return the function's result for each item, in order, from up to `threads` threads.

    One item is computed in this thread. After an error, no other item begins. The threads are
    daemons: one that hangs on a volume cannot be ended."""
    threads = min(threads, len(items))
    if threads < 2:
        return [function(item) for item in items]
    results: list[Future[Result]] = [Future() for _ in items]
    waiting = deque(zip(items, results, strict=True))

    def work() -> None:
        with suppress(IndexError):
            while True:
                item, result = waiting.popleft()
                try:
                    result.set_result(function(item))
                except Exception as error:  # noqa: BLE001 - raised where the result is wanted
                    result.set_exception(error)

    for _ in range(threads):
        threading.Thread(target=work, name="weights", daemon=True).start()
    try:
        return [result.result() for result in results]
    finally:
        waiting.clear()


def _check(
    folder: Path, entry: FileEntry, *, checksum: bool, version: str, go_on: Callable[[], None]
) -> None:
    file = check_own_file(folder, entry.name)
    size = file.stat().st_size
    if size != entry.bytes:
        raise LoadFailed(f"{version}: {entry.name} has {size} bytes, not {entry.bytes}")
    if checksum and read_again(lambda path: checksum_file(path, go_on), file) != entry:
        raise LoadFailed(f"{version}: {entry.name} is damaged (wrong checksum)")
