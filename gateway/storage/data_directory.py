"""The data directory: whose it is while a gateway runs, and the key that is kept in it."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

from tandem.errors import InvalidRequest


class DataDirectoryLock:
    """A context manager: one gateway for each data directory."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / "gateway.lock"
        self._fd: int | None = None

    def take(self) -> None:
        """Raises `InvalidRequest` when another process holds it."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise InvalidRequest(
                f"another gateway uses the data directory {self._path.parent}; stop it, or "
                "choose another directory with --data-dir (TANDEM_DATA_DIR)"
            ) from error
        self._fd = fd

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_error: object) -> None:
        self.release()


def keep_api_key(data_dir: Path) -> str:
    """The key of this data directory, made on first use. The SDK wants the `tml-` in front."""
    path = data_dir / "api_key"
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        key = f"tml-{secrets.token_urlsafe(32)}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(key + "\n")
        return key
