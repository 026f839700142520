"""External weights: what is in them for download, and how they are encrypted."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from gateway.checkpoints.age import SUFFIX, read_recipient
from gateway.checkpoints.catalog import Checkpoint
from tandem.errors import CheckpointDamaged, InvalidRequest, PublishFailed
from tandem.weights import FileEntry, Manifest, PartialVersion, open_version
from tandem.weights.store import check_own_file

_SLOWEST = 4 * 2**20
"""Bytes a second: encryption that is slower than this is given up."""
_RECORD = "checkpoint.json"
_MOST_RECIPIENTS = 20


def check_recipients(recipients: Sequence[str]) -> None:
    """Raises `InvalidRequest` for what files cannot be encrypted to."""
    if len(recipients) > _MOST_RECIPIENTS:
        raise InvalidRequest(
            f"there are {len(recipients)} age_encryption_recipients, {_MOST_RECIPIENTS} at most"
        )
    for recipient in recipients:
        read_recipient(recipient)


async def encrypt_version(
    plain: Path, sealed: Path, *, name: str, recipients: Sequence[str]
) -> int:
    """Writes the version `name`, whose files are those of `plain`, encrypted, with `.age` behind
    their names; returns its bytes. Raises `PublishFailed`; nothing is left then."""
    manifest = await asyncio.to_thread(open_version, plain, checksums=False)
    partial = PartialVersion(sealed)
    partial.create()
    try:
        entries = await _encrypt(
            [
                (str(plain / entry.name), str(partial.path / f"{entry.name}{SUFFIX}"))
                for entry in manifest.files
            ],
            recipients=recipients,
            timeout=60 + manifest.bytes / _SLOWEST,
        )
        written = manifest.model_copy(
            update={
                "version": name,
                "parent": manifest.version,
                "files": entries,
                "canary": None,
            }
        )
        await asyncio.to_thread(partial.commit, written)
    except BaseException:
        await asyncio.to_thread(partial.discard)
        raise
    return written.bytes


async def _encrypt(
    files: Sequence[tuple[str, str]], *, recipients: Sequence[str], timeout: float
) -> list[FileEntry]:
    task = json.dumps({"recipients": list(recipients), "files": files}).encode()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway.checkpoints.age",
        str(os.getpid()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
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


def files_of(checkpoint: Checkpoint, folder: Path) -> dict[str, Path]:
    """The files that make up a checkpoint, by name: what its manifest or record lists, and
    nothing else that may lie in the folder. A trainer's state includes its record.

    Raises `CheckpointDamaged` where that list cannot be read, or leads out of the folder.
    """
    try:
        if checkpoint.path.kind == "weights":
            record = json.loads((folder / _RECORD).read_bytes())
            names = [_RECORD, *(str(entry["name"]) for entry in record["files"])]
        else:
            manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
            names = [entry.name for entry in manifest.files]
    except (OSError, ValidationError, ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"{checkpoint.path} cannot be read: {error}") from error
    try:
        return {name: check_own_file(folder, name) for name in names}
    except OSError as error:
        raise CheckpointDamaged(f"{checkpoint.path} cannot be read: {error}") from error
