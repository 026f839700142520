"""Encrypts files to age recipients (age-encryption.org/v1), as a program of its own.

The library holds Python's interpreter lock while it works, which for gigabytes the gateway
cannot. `python -m gateway.checkpoints.age PARENT_PID` reads one JSON object from its standard
input, `{"recipients": ["age1…"], "files": [["from", "to"], …]}`, writes and syncs each target,
and prints `{"files": [{"name", "bytes", "checksum"}, …]}`. What goes wrong is said on standard
error, with exit status 1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyrage

from tandem.errors import InvalidRequest
from tandem.weights import checksum_file
from tandem.weights.store import fsync_path
from tandem.worker import die_with_parent

SUFFIX = ".age"


def read_recipient(text: str) -> object:
    """A native key (`age1…`) or an SSH public key. Raises `InvalidRequest`."""
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
    recipients = [read_recipient(text) for text in task["recipients"]]
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
