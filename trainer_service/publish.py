"""Publishes the current weights as a weight version (see `tandem/weights`)."""

from __future__ import annotations

import errno
import json
import re
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tandem.errors import PublishFailed, ServerError
from tandem.weights import Canary, FileEntry, Manifest, PartialVersion, checksum_file
from tandem.weights.store import fsync_path
from trainer_service.backends.base import TrainerBackend
from trainer_service.control import Control
from trainer_service.files import agree, check_free_space, storage_error
from trainer_service.microbatch import MicroBatch
from trainer_service.ownership import assign_owners

if TYPE_CHECKING:
    from torch import Tensor

CANARY_TOKENS = 16
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class VersionRequest:
    """What to publish: the version's `name` and final `path`, and its place in the run."""

    name: str
    path: Path
    run_id: str
    parent: str
    step: int


def bytes_needed(backend: TrainerBackend) -> int:
    """About how many bytes a version takes, its small files included."""
    return sum(backend.tensor_sizes().values()) * _ITEM_BYTES[backend.dtype] + 2**20


def prepare(request: VersionRequest, backend: TrainerBackend) -> PartialVersion:
    """Rank 0, before the other ranks hear of it: room on the disk, and the partial directory."""
    partial = PartialVersion(request.path)
    needed = bytes_needed(backend)
    check_free_space(request.path, what=request.name, needed=needed)
    try:
        if request.path.exists():
            raise PublishFailed(f"{request.name} exists already, and a version is never rewritten")
        partial.create()
    except OSError as error:
        raise storage_error(error, what=request.name, path=request.path, needed=needed) from error
    return partial


def publish(
    request: VersionRequest, *, backend: TrainerBackend, control: Control, model_path: Path
) -> Manifest | None:
    """All ranks write their files; rank 0 commits and returns the manifest.

    Raises on rank 0 alone `StorageFull` or `PublishFailed`; nothing of the version is left then.
    """
    partial = PartialVersion(request.path)
    needed = bytes_needed(backend)
    canary = compute_canary(backend)
    owners = assign_owners(backend.tensor_sizes(), ranks=control.size)
    tensors = backend.collect(
        dtype=backend.dtype, owned_by_me=lambda unit: owners[unit] == control.rank
    )
    name = (
        "model.safetensors"
        if control.size == 1
        else f"model-{control.rank + 1:05d}-of-{control.size:05d}.safetensors"
    )
    try:
        entries = agree(
            control,
            lambda: [_write_tensors(partial.path / name, tensors)],
            what=request.name,
            path=request.path,
            needed=needed,
        )
        if control.rank:
            return None
        return _commit(
            request, partial, entries, canary=canary, dtype=backend.dtype, model_path=model_path
        )
    except ServerError:
        partial.discard()
        raise
    except OSError as error:
        partial.discard()
        raise storage_error(error, what=request.name, path=request.path, needed=needed) from error


def compute_canary(backend: TrainerBackend) -> Canary:
    """The logprobs of a fixed pseudo-random sequence under the current weights."""
    facts = backend.facts
    length = min(CANARY_TOKENS, facts.max_length or CANARY_TOKENS)
    tokens = np.random.default_rng(17).integers(0, facts.vocabulary, length)
    shown = tokens[None, :-1]
    logprobs = backend.logprobs(
        MicroBatch(
            tokens=shown,
            targets=tokens[None, 1:, None],
            select=None,
            entries=np.arange(length - 1),
            inputs={},
        ),
        gradients=False,
    )
    return Canary(tokens=tokens.tolist(), logprobs=logprobs.cpu().tolist())


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str | int]:
    """Writes one safetensors file and says what is in it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        # The library reports the kernel's error as text alone.
        raise _as_os_error(error) from error
    path.chmod(0o644)  # the library makes it for its owner alone; a sampler may be another user
    fsync_path(path)
    entry = checksum_file(path)
    return {**entry.model_dump(), "tensors": json.dumps(sorted(tensors))}


def _as_os_error(error: Exception) -> OSError:
    found = re.search(r"os error (\d+)", str(error))
    return OSError(int(found.group(1)) if found else errno.EIO, str(error))


def _commit(
    request: VersionRequest,
    partial: PartialVersion,
    written: list[dict[str, str | int]],
    *,
    canary: Canary,
    dtype: str,
    model_path: Path,
) -> Manifest:
    entries = [FileEntry.model_validate(item) for item in written]
    weight_map = {
        tensor: str(item["name"]) for item in written for tensor in json.loads(str(item["tensors"]))
    }
    others = _copy_small_files(model_path, partial.path, dtype=dtype)
    if len(entries) > 1:
        others.append(_write_index(partial.path, entries, weight_map))
    for path in others:
        fsync_path(path)
        entries.append(checksum_file(path))
    manifest = Manifest(
        version=request.name,
        run_id=request.run_id,
        step=request.step,
        parent=request.parent,
        dtype=dtype,
        tensors=len(weight_map),
        created=datetime.now(UTC).isoformat(),
        files=entries,
        canary=canary,
    )
    partial.commit(manifest)
    return manifest


def _write_index(directory: Path, entries: list[FileEntry], weight_map: Mapping[str, str]) -> Path:
    path = directory / "model.safetensors.index.json"
    total = 0
    for entry in entries:
        with (directory / entry.name).open("rb") as file:
            (header,) = struct.unpack("<Q", file.read(8))
        total += entry.bytes - 8 - header
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    path.write_text(json.dumps(index, indent=1))
    return path


def _copy_small_files(source: Path, target: Path, *, dtype: str) -> list[Path]:
    """Configuration and tokenizer, so that the directory loads by itself."""
    copied = []
    for file in sorted(source.iterdir()):
        if (
            not file.is_file()
            or file.name == "manifest.json"
            or file.name.endswith(_WEIGHT_SUFFIXES)
            or file.name.endswith(".index.json")
            or file.name.startswith(".")
        ):
            continue
        path = target / file.name
        if file.name == "config.json":
            config = json.loads(file.read_text())
            config.pop("torch_dtype", None)
            path.write_text(json.dumps({**config, "dtype": dtype}, indent=2))
        else:
            shutil.copyfile(file, path)
        copied.append(path)
    return copied
