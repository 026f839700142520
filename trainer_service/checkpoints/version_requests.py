"""The request for a weight version, before its files are written and after its trainer died."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from tandem.errors import LoadFailed, PublishFailed
from tandem.v1 import trainer_pb2
from tandem.weights import Manifest, PartialVersion, open_version
from tandem.weights.manifest import MANIFEST_NAME
from tandem.weights.store import fsync_path, read_record
from tandem.weights.tensors import STORED_TYPES
from trainer_service.backends.base import TrainerBackend
from trainer_service.checkpoints.storage import check_free_space, storage_error

_MOST_READERS = 8


@dataclass(frozen=True)
class VersionRequest:
    """A version to publish: `name`, final `path`, `parent` version, `step`, the operation's id."""

    name: str
    path: Path
    run_id: str
    parent: str
    step: int
    operation: str = ""

    @classmethod
    def from_message(cls, request: trainer_pb2.PublishRequest, *, step: int) -> VersionRequest:
        return cls(
            name=request.version.name,
            path=Path(request.version.path),
            run_id=request.version.run_id or request.header.run_id,
            parent=request.parent,
            step=step,
            operation=request.header.operation_id,
        )


def bytes_needed(backend: TrainerBackend) -> int:
    if backend.training.lora:
        return backend.facts.trainable_parameters * 4 + 2**20
    return sum(export.bytes for export in backend.exports()) + 2**20


@dataclass(frozen=True)
class Published:
    """A version that others can read, in files or from a copy, if the manifest has no files.

    `make_durable` makes its files survive a power failure, if they do not yet, and returns their
    manifest. After its `OSError`, the version is gone."""

    manifest: Manifest
    make_durable: Callable[[], Manifest] | None = None


def prepare_publish(request: VersionRequest, backend: TrainerBackend) -> PartialVersion:
    """Check the free space and make the partial directory, on rank 0, before the announcement.

    Raises `StorageFull` or `PublishFailed`."""
    if backend.training.lora is None:
        for export in backend.exports():
            if str(export.dtype) not in STORED_TYPES:
                raise PublishFailed(
                    f"{request.name} cannot be written: {export.name} is {export.dtype}, and a "
                    f"version has tensors of {', '.join(STORED_TYPES.values())} alone"
                )
    version = PartialVersion(request.path)
    needed = bytes_needed(backend)
    try:
        check_free_space(request.path, what=request.name, needed=needed)
        if request.path.exists():
            _remove_torn(request)
        version.discard()  # left by a trainer that died while writing it
        version.create()
    except OSError as error:
        raise storage_error(error, what=request.name, needed=needed) from error
    return version


def published_by(request: VersionRequest) -> Published | None:
    """Return the version that this operation published before its trainer died, if any.

    A power failure may have damaged an early version. Raises `StorageFull` or `PublishFailed`."""
    try:
        manifest = open_version(request.path, threads=_MOST_READERS)
    except LoadFailed:
        return None
    if not request.operation or manifest.operation != request.operation:
        return None
    files = [request.path / entry.name for entry in manifest.files]
    try:
        PartialVersion(request.path).make_durable(partial(fsync_path, file) for file in files)
    except OSError as error:
        raise storage_error(error, what=request.name, needed=0) from error
    return Published(manifest)


def _remove_torn(request: VersionRequest) -> None:
    """Remove the folder of this operation's early publish that a power failure damaged.

    Raises `PublishFailed` if another version has the name."""
    with suppress(FileNotFoundError, ValidationError):
        found = Manifest.model_validate_json(read_record(request.path / MANIFEST_NAME))
        if not request.operation or found.operation != request.operation:
            raise PublishFailed(f"{request.name} exists already, and a version is never rewritten")
    shutil.rmtree(request.path)
