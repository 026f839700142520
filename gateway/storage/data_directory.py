"""The data directory: its lock, and the secrets that are kept in it."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.errors import InvalidRequest, unusable_directory
from tandem.settings import GatewaySettings
from tandem.weights.store import fsync_path, make_folder


@contextmanager
def locked_data_directory(data_dir: Path, *, shared: bool = False) -> Iterator[None]:
    """Make the directory if it is missing, and lock it while the block runs, so that only one
    gateway uses it; or those that have a lease between them (`shared`). Raise `InvalidRequest` if
    another process has locked it, or if it cannot be used."""
    try:
        with suppress(FileExistsError):
            make_folder(data_dir, mode=0o700)
        fd = os.open(data_dir / "gateway.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise unusable_directory(data_dir, error) from error
    try:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            raise InvalidRequest(
                f"another gateway uses the data directory {data_dir}; stop it, or choose another "
                "directory with --data-dir (TANDEM_DATA_DIR)"
            ) from error
        yield
    finally:
        os.close(fd)


def private_directory(settings: GatewaySettings) -> Path:
    """Return where the gateway keeps what no worker is to read; make it if it is missing. Raises
    `InvalidRequest` if it cannot be used."""
    try:
        with suppress(FileExistsError):
            make_folder(settings.private, mode=0o700)
    except OSError as error:
        raise unusable_directory(settings.private, error) from error
    return settings.private


def relative_path(path: Path, data_dir: Path) -> str:
    """Return a path as the database has it: relative to the data directory, which can then be
    moved, if it lies in it."""
    return str(path.relative_to(data_dir) if path.is_relative_to(data_dir) else path)


def keep_api_key(data_dir: Path) -> str:
    """Return the local key of this data directory, made on first use. The SDK requires the
    prefix `tml-`."""
    return _keep(data_dir / "api_key", f"tml-{secrets.token_urlsafe(32)}")


def keep_signing_key(data_dir: Path) -> bytes:
    """Return the 32 bytes with which this data directory's gateway signs tokens, cursors and
    addresses, made on first use. Without the file, everything signed before is void."""
    return bytes.fromhex(_keep(data_dir / "signing_key", secrets.token_hex(32)))


def _keep(path: Path, new: str) -> str:
    """Return the content of a file that only its owner may read; write `new` if there is none."""
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        write_private(path, f"{new}\n".encode())
        return new


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically that only its owner may read. Raises `OSError`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
    fsync_path(path.parent)
