"""The directory of weight versions: publish, verify and remove them.

Layout under a data directory: `weights/RUN/vNNNNNN-RANDOM/` for a version, where RUN is the
run id with `:` replaced by `_`, and `weights/RUN/.partial-vNNNNNN-RANDOM/` while it is being
written. A version's name is `RUN_ID/vNNNNNN-RANDOM`. Names are never reused, since an NFS client
may show a replaced file 30 s late; nothing here polls or lists for the newest.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from pathlib import Path

from pydantic import ValidationError

from tandem.errors import LoadFailed, without_paths
from tandem.weights.manifest import MANIFEST_NAME, Manifest, checksum_file

_PARTIAL_PREFIX = ".partial-"


def new_version_name(*, run_id: str, number: int) -> str:
    """Return a new name, such as `s-ab12:train:0/v000003-9f2c41d0`."""
    return f"{run_id}/v{number:06d}-{secrets.token_hex(4)}"


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


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Make a folder and those above it, and make their names survive a power failure."""
    missing = [path, *(parent for parent in path.parents if not parent.exists())]
    path.mkdir(mode=mode, parents=True)
    for folder in missing:
        fsync_path(folder.parent)


class PartialVersion:
    """A version being written. Every rank may write files into `path`; one rank commits.

    Literal use: `partial = PartialVersion(final); partial.create(); …write into
    partial.path…; partial.commit(manifest)`. On any failure call `discard()`.
    """

    def __init__(self, final: Path) -> None:
        self.final = final
        self.path = final.parent / f"{_PARTIAL_PREFIX}{final.name}"

    def create(self) -> None:
        make_folder(self.path)

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, make everything durable and give the version its name.

        Writers fsync their own files; the manifest, the directory and the rename are synced here.
        """
        target = self.path / MANIFEST_NAME
        with target.open("w", encoding="utf-8") as file:
            file.write(manifest.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())
        fsync_path(self.path)
        self.path.rename(self.final)
        fsync_path(self.final.parent)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def check_own_file(folder: Path, name: str) -> Path:
    """Return the path of a file that we wrote into a folder.

    Raises `OSError` if the name leads out of the folder, if the folder or the file is a link, or
    if the file is not a regular file: we never write such, so somebody else did.
    """
    file = folder / name
    if not name or name != Path(name).name or name == ".." or "\0" in name:
        raise OSError(f"{name[:100]!r} is not the name of a file")
    if folder.is_symlink() or not stat.S_ISREG(file.lstat().st_mode):
        raise OSError(f"{folder.name}/{name} is not a plain file in a folder of its own")
    return file


def open_version(path: Path, *, name: str = "", checksums: bool = True) -> Manifest:
    """Read and verify a version before anything is loaded from it.

    Raises `LoadFailed` when the manifest is missing or of another version than `name`, or when a
    file is missing, of another size or (unless `checksums` is off) damaged.
    """
    try:
        manifest = Manifest.model_validate_json((path / MANIFEST_NAME).read_bytes())
    except OSError as error:
        why = without_paths(str(error))
        raise LoadFailed(f"{path.name} is not a published weight version: {why}") from error
    except ValidationError as error:
        raise LoadFailed(f"the manifest of {path.name} is damaged: {error}") from error
    if name and manifest.version != name:
        raise LoadFailed(f"{path.name} holds {manifest.version}, not {name}")
    for entry in manifest.files:
        try:
            file = check_own_file(path, entry.name)
            size = file.stat().st_size
        except OSError as error:
            why = without_paths(str(error))
            raise LoadFailed(f"{manifest.version} lacks {entry.name}: {why}") from error
        if size != entry.bytes:
            raise LoadFailed(
                f"{manifest.version}: {entry.name} has {size} bytes, not {entry.bytes}"
            )
        if checksums and checksum_file(file).checksum != entry.checksum:
            raise LoadFailed(f"{manifest.version}: {entry.name} is damaged (wrong checksum)")
    return manifest
