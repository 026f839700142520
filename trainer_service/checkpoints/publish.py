"""Publishes the current weights as a weight version (see `tandem/weights`).

A version holds the whole model, or, in a LoRA run, the adapter alone in PEFT's layout.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tandem.errors import LoadFailed, PublishFailed, ServerError
from tandem.v1 import trainer_pb2
from tandem.weights import (
    Canary,
    Checksum,
    FileEntry,
    Manifest,
    PartialVersion,
    checksum_file,
    open_version,
)
from tandem.weights.store import fsync_path, sync_name
from tandem.worker import LoraSpec
from trainer_service.backends.base import LoraBackend, TrainerBackend
from trainer_service.batches.micro_batches import MicroBatch
from trainer_service.checkpoints.storage import agree, check_free_space, storage_error
from trainer_service.compute.trainer import RankTrainer
from trainer_service.lora.adapters import WEIGHTS_NAME, AdapterConfig
from trainer_service.models.files import (
    StoredTensor,
    TensorWriter,
    copy_small_files,
    write_index,
)

if TYPE_CHECKING:
    from torch import Tensor


CANARY_TOKENS = 16
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_STORED_TYPES = {"torch.float32": "F32", "torch.bfloat16": "BF16"}


@dataclass(frozen=True)
class VersionRequest:
    """What to publish: the version's `name` and final `path`, its `parent` version, the run's
    `step`, and the request_id of the `operation`. `merged` asks a LoRA run for the whole model
    instead of the adapter."""

    name: str
    path: Path
    run_id: str
    parent: str
    step: int
    operation: str = ""
    merged: bool = False

    @classmethod
    def from_message(cls, request: trainer_pb2.PublishRequest, *, step: int) -> VersionRequest:
        return cls(
            name=request.version.name,
            path=Path(request.version.path),
            run_id=request.version.run_id or request.header.run_id,
            parent=request.parent,
            step=step,
            operation=request.header.operation_id,
            merged=request.merged,
        )


def adapter_of(request: VersionRequest, backend: TrainerBackend) -> LoraSpec | None:
    """The adapter's specification, if the version is to hold one."""
    return None if request.merged else backend.training.lora


def bytes_needed(request: VersionRequest, backend: TrainerBackend) -> int:
    """About how many bytes a version takes, small files included."""
    if adapter_of(request, backend):
        return backend.facts.trainable_parameters * 4 + 2**20
    return sum(backend.tensor_sizes().values()) * _ITEM_BYTES[backend.dtype] + 2**20


def prepare_publish(request: VersionRequest, backend: TrainerBackend) -> PartialVersion:
    """Checks the free space and makes the partial directory, on rank 0, before publishing is
    announced. Raises `StorageFull` or `PublishFailed`."""
    partial = PartialVersion(request.path)
    needed = bytes_needed(request, backend)
    try:
        check_free_space(request.path, what=request.name, needed=needed)
        if request.path.exists():
            raise PublishFailed(f"{request.name} exists already, and a version is never rewritten")
        partial.discard()  # left by a trainer that died while writing it
        partial.create()
    except OSError as error:
        raise storage_error(error, what=request.name, needed=needed) from error
    return partial


def published_by(request: VersionRequest) -> Manifest | None:
    """Return what this very operation has published already, if it has: by a trainer that died
    before it could say so. Raises `StorageFull` or `PublishFailed`."""
    try:
        manifest = open_version(request.path, checksums=False)  # other ranks wait meanwhile
    except LoadFailed:
        return None
    if not request.operation or manifest.operation != request.operation:
        return None
    try:
        sync_name(request.path)
    except OSError as error:
        raise storage_error(error, what=request.name, needed=0) from error
    return manifest


def publish(request: VersionRequest, trainer: RankTrainer) -> Manifest | None:
    """Writes this rank's file. Rank 0 commits and returns the manifest, or raises `StorageFull`
    or `PublishFailed` with nothing left of the version."""
    backend, control = trainer.backend, trainer.control
    partial = PartialVersion(request.path)
    needed = bytes_needed(request, backend)
    canary = compute_canary(backend)
    name, tensors = _collect(request, trainer)
    try:
        entries = agree(
            control,
            lambda: [_write_tensors(partial.path / name, tensors)] if name else [],
            what=request.name,
            needed=needed,
        )
        if control.rank:
            return None
        return _commit(request, partial, entries, canary=canary, trainer=trainer)
    except ServerError:
        partial.discard()
        raise
    except OSError as error:
        partial.discard()
        raise storage_error(error, what=request.name, needed=needed) from error


def _collect(request: VersionRequest, trainer: RankTrainer) -> tuple[str, dict[str, Tensor]]:
    """The file that this rank writes ("" for none) and its tensors."""
    backend, control = trainer.backend, trainer.control
    if adapter_of(request, backend):
        assert isinstance(backend, LoraBackend)
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
    """Writes one safetensors file. Returns its entry in the manifest, with the tensors' names;
    the checksum is of what was written, and nothing is read again for it.

    The library would write it, too, but close it without looking whether that succeeds, which is
    where NFS tells that it could not write; and a sync of the file opened anew knows nothing of it.
    """
    stored = {
        name: StoredTensor(
            file=path,
            name=name,
            dtype=_STORED_TYPES[str(tensor.dtype)],
            shape=tuple(tensor.shape),
            start=0,
            bytes=tensor.numel() * tensor.element_size(),
        )
        for name, tensor in tensors.items()
    }
    writer, checksum = TensorWriter(stored), Checksum()
    with path.open("xb") as file:
        pieces = (_bytes_of(tensors[name]) for name in writer.order)
        for content in itertools.chain[bytes | memoryview]([writer.header], pieces):
            file.write(content)
            checksum.update(content)
        file.flush()
        os.fsync(file.fileno())
    entry = checksum.entry(path.name)
    return {**entry.model_dump(), "tensors": json.dumps(sorted(tensors))}


def _bytes_of(tensor: Tensor) -> memoryview:
    import torch

    content = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(content.view(torch.uint8).numpy())


def _commit(
    request: VersionRequest,
    partial: PartialVersion,
    written: list[dict[str, str | int]],
    *,
    canary: Canary,
    trainer: RankTrainer,
) -> Manifest:
    backend, base = trainer.backend, trainer.base
    entries = [FileEntry.model_validate(item) for item in written]
    weight_map = {
        tensor: str(item["name"]) for item in written for tensor in json.loads(str(item["tensors"]))
    }
    lora = adapter_of(request, backend)
    if lora:
        assert isinstance(backend, LoraBackend)
        others = copy_small_files(base.path, partial.path, adapter=True)
        config = AdapterConfig(
            base_model=base.name,
            rank=lora.rank,
            alpha=lora.alpha,
            targets=backend.adapter_targets(),
        )
        others.append(config.write(partial.path))
    else:
        untied = isinstance(backend, LoraBackend) and backend.unties_head
        others = copy_small_files(base.path, partial.path, dtype=backend.dtype, untied=untied)
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
        operation=request.operation,
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
    """The size of a safetensors file without its header."""
    with (directory / entry.name).open("rb") as file:
        (header,) = struct.unpack("<Q", file.read(8))
    return int(entry.bytes) - 8 - int(header)


def assign_owners(sizes: Mapping[str, int], *, ranks: int) -> dict[str, int]:
    """The owner of each unit: largest first, each to the rank with the least so far.

    Literal example: `assign_owners({"a": 5, "b": 3, "c": 3}, ranks=2)` is
    `{"a": 0, "b": 1, "c": 1}`.
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = loads[0]
        owners[name] = rank
        heapq.heapreplace(loads, (load + sizes[name], rank))
    return owners
