"""The key with which the gateway signs what it hands out: tokens, cursors, download addresses.

One key for each data directory. What it signed stays good over a restart of the gateway, and
nothing else does: who removes the file makes every token and address void.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from pathlib import Path

_KEY_BYTES = 32


def keep_signing_key(data_dir: Path) -> bytes:
    """The 32 bytes of this data directory's `signing_key` (mode 0600), made on first use."""
    path = data_dir / "signing_key"
    try:
        return bytes.fromhex(path.read_text(encoding="ascii").strip())
    except FileNotFoundError:
        key = secrets.token_bytes(_KEY_BYTES)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.unlink(missing_ok=True)
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(key.hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        return key


def sign(key: bytes, *parts: str | int) -> str:
    """An HMAC-SHA256 over the parts, as 43 characters that need no escape in an address.

    The parts are kept apart by their lengths, so that no two lists of parts give the same
    bytes. Put the purpose in front (`"trace"`, `"external_weights"`): what was signed for one
    use is then good for no other.
    """
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        raw = str(part).encode()
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode("ascii")


def is_signed(key: bytes, signature: str, *parts: str | int) -> bool:
    """Whether `signature` is that of the parts, compared in constant time."""
    return hmac.compare_digest(sign(key, *parts).encode(), signature.encode())
