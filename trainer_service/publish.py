"""Publishes the current weights as a weight version (see `tandem/weights`).

A version holds the whole model, or, of a LoRA run, the adapter alone in PEFT's layout.
"""

from __future__ import annotations

import errno
import json
import re
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
from tandem.worker import LoraSpec
from trainer_service.backends.base import TrainerBackend
from trainer_service.base_model import BaseModelFiles
from trainer_service.control import Control
from trainer_service.files import agree, check_free_space, storage_error
from trainer_service.lora_files import WEIGHTS_NAME, AdapterConfig
from trainer_service.microbatch import MicroBatch
from trainer_service.model_files import copy_small_files, write_index
from trainer_service.ownership import assign_owners

if TYPE_CHECKING:
    from torch import Tensor

CANARY_TOKENS = 16
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class VersionRequest:
    """What to publish: the version's `name` and final `path`, and its place in the run. `merged`
    asks a LoRA run for the whole model instead of the adapter."""

    name: str
    path: Path
    run_id: str
    parent: str
    step: int
    merged: bool = False


def adapter_of(request: VersionRequest, backend: TrainerBackend) -> LoraSpec | None:
    """Set when the version is to be an adapter."""
    return None if request.merged else backend.training.lora


def bytes_needed(request: VersionRequest, backend: TrainerBackend) -> int:
    """About how many bytes a version takes, its small files included."""
    if adapter_of(request, backend):
        return backend.facts.trainable_parameters * 4 + 2**20
    return sum(backend.tensor_sizes().values()) * _ITEM_BYTES[backend.dtype] + 2**20


def prepare(request: VersionRequest, backend: TrainerBackend) -> PartialVersion:
    """Rank 0, before the other ranks hear of it: room on the disk, and the partial directory."""
    partial = PartialVersion(request.path)
    needed = bytes_needed(request, backend)
    check_free_space(request.path, what=request.name, needed=needed)
    try:
        if request.path.exists():
            raise PublishFailed(f"{request.name} exists already, and a version is never rewritten")
        partial.create()
    except OSError as error:
        raise storage_error(error, what=request.name, path=request.path, needed=needed) from error
    return partial


def publish(
    request: VersionRequest, *, backend: TrainerBackend, control: Control, base: BaseModelFiles
) -> Manifest | None:
    """All ranks write their files; rank 0 commits and returns the manifest.

    Raises on rank 0 alone `StorageFull` or `PublishFailed`; nothing of the version is left then.
    """
    partial = PartialVersion(request.path)
    needed = bytes_needed(request, backend)
    canary = compute_canary(backend)
    name, tensors = _collect(request, backend=backend, control=control)
    try:
        entries = agree(
            control,
            lambda: [_write_tensors(partial.path / name, tensors)] if name else [],
            what=request.name,
            path=request.path,
            needed=needed,
        )
        if control.rank:
            return None
        return _commit(request, partial, entries, canary=canary, backend=backend, base=base)
    except ServerError:
        partial.discard()
        raise
    except OSError as error:
        partial.discard()
        raise storage_error(error, what=request.name, path=request.path, needed=needed) from error


def _collect(
    request: VersionRequest, *, backend: TrainerBackend, control: Control
) -> tuple[str, dict[str, Tensor]]:
    """The file that this rank is to write, and its tensors; no name where there is none."""
    if adapter_of(request, backend):
        return "" if control.rank else WEIGHTS_NAME, backend.collect_adapter()
    owners = assign_owners(backend.tensor_sizes(), ranks=control.size)
    tensors = backend.collect(
        dtype=backend.dtype, owned_by_me=lambda unit: owners[unit] == control.rank
    )
    if control.size == 1:
        return "model.safetensors", tensors
    return f"model-{control.rank + 1:05d}-of-{control.size:05d}.safetensors", tensors


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
    backend: TrainerBackend,
    base: BaseModelFiles,
) -> Manifest:
    entries = [FileEntry.model_validate(item) for item in written]
    weight_map = {
        tensor: str(item["name"]) for item in written for tensor in json.loads(str(item["tensors"]))
    }
    lora = adapter_of(request, backend)
    if lora:
        others = copy_small_files(base.path, partial.path, adapter=True)
        config = AdapterConfig(
            base_model=base.name,
            rank=lora.rank,
            alpha=lora.alpha,
            targets=backend.adapter_targets(),
        )
        others.append(config.write(partial.path))
    else:
        others = copy_small_files(
            base.path, partial.path, dtype=backend.dtype, untied=backend.unties_head
        )
    if len(entries) > 1:
        total = sum(_tensor_bytes(partial.path, entry) for entry in entries)
        others.append(write_index(partial.path, weight_map=weight_map, total_bytes=total))
    for path in others:
        fsync_path(path)
        entries.append(checksum_file(path))
    manifest = Manifest(
        version=request.name,
        run_id=request.run_id,
        step=request.step,
        parent=request.parent,
        adapter=lora is not None,
        dtype="float32" if lora else backend.dtype,
        tensors=len(weight_map),
        created=datetime.now(UTC).isoformat(),
        files=entries,
        canary=canary,
    )
    partial.commit(manifest)
    return manifest


def _tensor_bytes(directory: Path, entry: FileEntry) -> int:
    """Without the header of a safetensors file."""
    with (directory / entry.name).open("rb") as file:
        (header,) = struct.unpack("<Q", file.read(8))
    return int(entry.bytes) - 8 - int(header)
