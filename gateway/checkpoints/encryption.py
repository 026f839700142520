"""Encrypts weight versions to age recipients (age-encryption.org/v1).

The library holds the interpreter's lock, so encryption is a program of its own: `python -m
gateway.checkpoints.encryption PARENT_PID PLAIN SEALED NAME`. It reads recipients from standard
input, one a line, writes the version NAME to the folder SEALED, and prints its bytes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pyrage

from tandem.errors import InvalidRequest, PublishFailed, without_paths
from tandem.protocol.worker import die_with_parent
from tandem.weights import PartialVersion, checksum_file, open_version

_MIN_BYTES_PER_SECOND = 4 * 2**20
"""Slower encryption is given up."""
_MAX_RECIPIENTS = 20


def check_recipients(recipients: Sequence[str]) -> None:
    """Raise `InvalidRequest` for invalid recipients."""
    if len(recipients) > _MAX_RECIPIENTS:
        raise InvalidRequest(
            f"there are {len(recipients)} age_encryption_recipients, {_MAX_RECIPIENTS} at most"
        )
    for recipient in recipients:
        _parse_recipient(recipient)


async def encrypt_version(
    plain: Path, sealed: Path, *, name: str, recipients: Sequence[str]
) -> int:
    """Write the version `name` to the folder `sealed`: the encrypted files of `plain`, with `.age`
    appended to their names. Return its bytes. On an error, leave nothing and raise `PublishFailed`.
    """
    manifest = await asyncio.to_thread(open_version, plain, checksums=False)
    timeout = 60 + manifest.bytes / _MIN_BYTES_PER_SECOND
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.checkpoints.encryption", str(os.getpid())),
        *(plain, sealed, name),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout):
            answer, errors = await process.communicate("\n".join(recipients).encode())
    except TimeoutError as error:
        raise PublishFailed(f"encrypting the weights took longer than {timeout:.0f} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        if process.returncode != 0:
            await asyncio.to_thread(PartialVersion(sealed).discard)
    if process.returncode != 0:
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise PublishFailed(f"the weights could not be encrypted: {without_paths(reason)}")
    return int(answer)


def _parse_recipient(text: str) -> object:
    """Parse an age key (`age1…`) or an SSH public key. Raises `InvalidRequest`."""
    try:
        if text.startswith("ssh-"):
            return pyrage.ssh.Recipient.from_str(text)
        return pyrage.x25519.Recipient.from_str(text)
    except pyrage.RecipientError as error:
        raise InvalidRequest(
            f"{text[:80]!r} is no age recipient ({error}); give an age1… key, or an SSH public "
            "key of type ssh-ed25519 or ssh-rsa"
        ) from error


def main(parent_pid: str, plain: str, sealed: str, name: str) -> None:
    die_with_parent(int(parent_pid))
    recipients = [_parse_recipient(line) for line in sys.stdin.read().splitlines()]
    print(seal_version(Path(plain), Path(sealed), name=name, recipients=recipients))


def seal_version(plain: Path, sealed: Path, *, name: str, recipients: Sequence[object]) -> int:
    """Write the version and return its bytes. Raises `LoadFailed`, `OSError` or pyrage's
    `EncryptError`."""
    manifest = open_version(plain, checksums=False)
    partial = PartialVersion(sealed)
    partial.create()
    entries = []
    for entry in manifest.files:
        target = partial.path / f"{entry.name}.age"
        with (plain / entry.name).open("rb") as source, target.open("xb") as file:
            pyrage.encrypt_io(source, file, recipients)
            file.flush()
            os.fsync(file.fileno())
        entries.append(checksum_file(target))
    written = manifest.model_copy(
        update={"version": name, "parent": manifest.version, "files": entries, "canary": None}
    )
    partial.commit(written)
    return written.bytes


if __name__ == "__main__":
    main(*sys.argv[1:])
