"""The data directory: its lock, its secrets, and files written at once."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.errors import InvalidRequest, unusable_directory
from tandem.settings.gateway import GatewaySettings
from tandem.weights.store import fsync_path, make_folder


@contextmanager
def locked_data_directory(data_dir: Path, *, shared: bool = False) -> Iterator[None]:
    """Lock the directory, created if needed, for the block. Gateways of which one leads
    use a `shared` lock. Raise `InvalidRequest` if it is locked or unusable."""
    _make_private(data_dir)
    try:
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
    """Return the folder that workers must not read, created if needed. Raises `InvalidRequest`."""
    _make_private(settings.private)
    return settings.private


def _make_private(folder: Path) -> None:
    try:
        with suppress(FileExistsError):
            make_folder(folder, mode=0o700)
    except OSError as error:
        raise unusable_directory(folder, error) from error


def relative_path(path: Path, data_dir: Path) -> str:
    """Return the path for the database: relative inside the data directory, which may be moved."""
    return str(path.relative_to(data_dir) if path.is_relative_to(data_dir) else path)


def keep_api_key(data_dir: Path) -> str:
    """Return the local key, created on first use. The SDK requires the prefix `tml-`."""
    return _keep(data_dir / "api_key", f"tml-{secrets.token_urlsafe(32)}")


def keep_signing_key(data_dir: Path) -> bytes:
    """Return the 32-byte signing key, created on first use. Without the file, earlier signatures
    are void."""
    return bytes.fromhex(_keep(data_dir / "signing_key", secrets.token_hex(32)))


def _keep(path: Path, new: str) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        write_file(path, f"{new}\n".encode(), synced=True)
        return new


def write_file(file: Path, content: bytes, *, synced: bool = False) -> None:
    """Write a file atomically, readable by its owner only, with its folder if needed. With
    `synced`, the file survives a power failure. Raises `OSError`."""
    if not file.parent.is_dir():
        with suppress(FileExistsError):
            make_folder(file.parent)
    partial = file.with_name(f".{file.name}")
    try:
        with partial.open("wb") as stream:
            partial.chmod(0o600)
            stream.write(content)
            if synced:
                stream.flush()
                os.fsync(stream.fileno())
        partial.replace(file)
        if synced:
            fsync_path(file.parent)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
