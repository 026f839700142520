"""Encrypts weight versions to age recipients (age-encryption.org/v1).

The library holds Python's interpreter lock while it works, which the gateway cannot afford for
gigabytes, so encryption is a program of its own: `python -m gateway.checkpoints.encryption
PARENT_PID` reads one JSON object from its standard input, `{"recipients": ["age1…"], "files":
[["from", "to"], …]}`, writes and syncs each target, and prints `{"files": [{"name", "bytes",
"checksum"}, …]}`. It reports a failure on standard error, with exit status 1.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pyrage

from tandem.errors import InvalidRequest, PublishFailed
from tandem.weights import FileEntry, PartialVersion, checksum_file, open_version
from tandem.weights.store import fsync_path
from tandem.worker import die_with_parent

_SUFFIX = ".age"
_MIN_BYTES_PER_SECOND = 4 * 2**20
"""Encryption that is slower than this is given up."""
_MAX_RECIPIENTS = 20


def check_recipients(recipients: Sequence[str]) -> None:
    """Raise `InvalidRequest` if files cannot be encrypted to these recipients."""
    if len(recipients) > _MAX_RECIPIENTS:
        raise InvalidRequest(
            f"there are {len(recipients)} age_encryption_recipients, {_MAX_RECIPIENTS} at most"
        )
    for recipient in recipients:
        _parse_recipient(recipient)


async def encrypt_version(
    plain: Path, sealed: Path, *, name: str, recipients: Sequence[str]
) -> int:
    """Write the version `name` to the folder `sealed`: the files of `plain`, encrypted, with
    `.age` appended to their names. Return its bytes. Raise `PublishFailed`, and leave nothing
    behind in that case."""
    manifest = await asyncio.to_thread(open_version, plain, checksums=False)
    partial = PartialVersion(sealed)
    partial.create()
    try:
        entries = await _run_program(
            [
                (str(plain / entry.name), str(partial.path / f"{entry.name}{_SUFFIX}"))
                for entry in manifest.files
            ],
            recipients=recipients,
            timeout=60 + manifest.bytes / _MIN_BYTES_PER_SECOND,
        )
        written = manifest.model_copy(
            update={"version": name, "parent": manifest.version, "files": entries, "canary": None}
        )
        await asyncio.to_thread(partial.commit, written)
    except BaseException:
        await asyncio.to_thread(partial.discard)
        raise
    return written.bytes


async def _run_program(
    files: Sequence[tuple[str, str]], *, recipients: Sequence[str], timeout: float
) -> list[FileEntry]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.checkpoints.encryption", str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    task = json.dumps({"recipients": list(recipients), "files": files}).encode()
    try:
        async with asyncio.timeout(timeout):
            answer, errors = await process.communicate(task)
    except TimeoutError as error:
        raise PublishFailed(f"encrypting the weights took longer than {timeout:.0f} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise PublishFailed(f"the weights could not be encrypted: {reason}")
    return [FileEntry.model_validate(entry) for entry in json.loads(answer)["files"]]


def _parse_recipient(text: str) -> object:
    """Parse a native key (`age1…`) or an SSH public key. Raise `InvalidRequest`."""
    try:
        if text.startswith("ssh-"):
            return pyrage.ssh.Recipient.from_str(text)
        return pyrage.x25519.Recipient.from_str(text)
    except pyrage.RecipientError as error:
        raise InvalidRequest(
            f"{text[:80]!r} is no age recipient ({error}); give an age1… key, or an SSH public "
            "key of type ssh-ed25519 or ssh-rsa"
        ) from error


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    task = json.load(sys.stdin)
    recipients = [_parse_recipient(text) for text in task["recipients"]]
    entries = []
    for source, target in task["files"]:
        pyrage.encrypt_file(source, target, recipients)
        fsync_path(Path(target))
        entries.append(checksum_file(Path(target)).model_dump())
    json.dump({"files": entries}, sys.stdout)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, pyrage.EncryptError) as problem:
        sys.exit(f"{type(problem).__name__}: {problem}")
