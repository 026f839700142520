"""Publishes the current weights as a weight version (see `tandem/weights`).

A version is the whole model, or a LoRA run's adapter in PEFT's layout."""

from __future__ import annotations

import heapq
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial as with_arguments
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from tandem.errors import ServerError
from tandem.weights import (
    Canary,
    FileEntry,
    Manifest,
    PartialVersion,
    checksum_file,
)
from tandem.weights.adapter_files import WEIGHTS_NAME, AdapterConfig
from tandem.weights.card import CARD_NAME, adapter_card
from tandem.weights.layout import (
    TensorWriter,
    copy_small_files,
    write_index,
)
from tandem.weights.model_files import ties_head
from tandem.weights.model_store import read_record as read_model_record
from tandem.weights.store import fsync_path, in_threads, sync_at_once
from tandem.weights.sums import TensorSums
from tandem.weights.tensors import STORED_TYPES, StoredTensor
from trainer_service.backends.base import Export
from trainer_service.batches.micro_batches import MicroBatch
from trainer_service.checkpoints.handoff import KeptCopy
from trainer_service.checkpoints.host_copies import HostCopies
from trainer_service.checkpoints.storage import (
    FILE_BYTES,
    STALLED_AFTER,
    ByteCount,
    HashedFile,
    agree,
    begin,
    end_together,
    storage_error,
)
from trainer_service.checkpoints.version_requests import (
    Published,
    VersionRequest,
    bytes_needed,
)
from trainer_service.compute.control_group import LaterResults
from trainer_service.compute.trainer import RankTrainer

if TYPE_CHECKING:
    from torch import Tensor

CANARY_TOKENS = 16
_MOST_WRITERS = 8
LEAST_BYTES = 64 * 2**20
"""Of a file for a writer of its own."""


def publish(
    request: VersionRequest,
    trainer: RankTrainer,
    copy: KeptCopy | None = None,
    *,
    early: bool = False,
) -> Published | None:
    """Write this rank's files. A single rank may also keep a `copy` of the whole model.

    Rank 0 commits and returns the version, `early` before the syncs. After `StorageFull` or
    `PublishFailed` nothing is left."""
    backend, control = trainer.backend, trainer.control
    later = control.expect_later()
    partial = PartialVersion(request.path)
    needed = bytes_needed(backend)
    exported = _export(request, partial, trainer, copy)
    written = begin(lambda: _write_files(partial, exported, trainer, synced=not early))
    # Computed meanwhile, because it needs no disk. If it fails, the process ends at once, and the
    # next publish discards the partial version.
    canary = compute_canary(trainer)
    try:
        entries = agree(
            control,
            lambda: end_together(control.group, written, progress=exported.progress),
            what=request.name,
            needed=needed,
        )
        if control.rank:
            if early and written.done() and written.exception() is None:
                begin(lambda: later.tell(_sync_files(exported)))
            return None
        manifest, index = _manifest(request, partial, entries, canary=canary, trainer=trainer)
        if not early:
            partial.commit(manifest, unsynced=index)
            return Published(manifest)
        partial.commit_early(manifest)
        small = [str(entry["name"]) for entry in written.result() if not entry["tensor_bytes"]]
        small += [each.name for each in index]
        return Published(manifest, lambda: _make_durable(partial, exported, small, later))
    except (ServerError, OSError) as error:
        if written.done():  # otherwise a file would wait for its hanging writer
            exported.opened.close()
        partial.discard()
        if isinstance(error, ServerError):
            raise
        raise storage_error(error, what=request.name, needed=needed) from error


@dataclass(frozen=True)
class _Exported:
    """A rank's open files of weights, with their tensors, and the error, if it `failed`.

    `unwritten` are the tensors by name, if they are still to be written."""

    files: list[tuple[HashedFile, list[Export]]]
    opened: ExitStack
    progress: ByteCount
    sums: TensorSums
    unwritten: Mapping[str, Tensor] = field(default_factory=dict)
    failed: OSError | None = None

    def syncs(self) -> list[Callable[[], None]]:
        """Return functions that sync and close a file each."""

        def sync(file: HashedFile) -> None:
            file.sync()
            file.close()

        return [with_arguments(sync, file) for file, _ in self.files]

    def write_file(self, written: tuple[HashedFile, list[Export]]) -> None:
        file, exports = written
        order = _writer(file.name, exports).order
        tensors = ((name, self.unwritten[name]) for name in order)
        _write_tensors(file, exports, self.sums.summing(tensors))


def _export(
    request: VersionRequest, partial: PartialVersion, trainer: RankTrainer, copy: KeptCopy | None
) -> _Exported:
    """Write the weights in this rank's files, without slow syncs, because other ranks wait.

    Large files of a single rank are only opened. Threads write them later."""
    backend, control = trainer.backend, trainer.control
    sums, writers = TensorSums(backend.dtype), 1
    if backend.training.lora:
        adapter = backend.export_adapter()
        tensors = iter(adapter.items())
        exports = [
            Export(name, tuple(each.shape), each.dtype, unit=name) for name, each in adapter.items()
        ]
        files = {WEIGHTS_NAME: exports} if control.rank == 0 else {}
    else:
        exports = list(backend.exports())
        owners = assign_owners(exports, ranks=control.size)
        if backend.exports_stay:
            writers = _writers(backend.device, exports)
        files = name_files(exports, owners, ranks=control.size, writers=writers)[control.rank]
        units = {unit for unit, rank in owners.items() if rank == control.rank}
        tensors = backend.export_weights(units)
        if copy is not None:
            tensors = copy.copying(tensors)
        if writers == 1:
            tensors = sums.summing(tensors)
    exported = _Exported([], ExitStack(), ByteCount(), sums)
    try:
        for name, exports in files.items():
            file = HashedFile(partial.path / name, progress=exported.progress)
            exported.files.append((exported.opened.enter_context(closing(file)), exports))
            if writers == 1:
                _write_tensors(file, exports, tensors)
        return replace(exported, unwritten=dict(tensors))
    except OSError as error:
        return replace(exported, failed=error)
    finally:
        for _ in tensors:  # after an error too: the other ranks wait for this one to gather them
            pass
    return exported


def _write_files(
    partial: PartialVersion, exported: _Exported, trainer: RankTrainer, *, synced: bool
) -> list[dict[str, str | int]]:
    """Write this rank's files. Return their manifest entries. Raises `OSError`.

    They are `synced` and closed, or stay open for later syncs."""

    def count(sync: Callable[[], None]) -> None:
        sync()
        exported.progress.bytes += 1

    with ExitStack() as at_end:
        at_end.push(exported.opened)
        if exported.failed is not None:
            raise exported.failed
        if exported.unwritten:
            in_threads(exported.write_file, exported.files, threads=_MOST_WRITERS)
        others = [] if trainer.control.rank else _write_small_files(partial, trainer)
        if synced:
            syncs = [file.sync for file, _ in exported.files] + [
                with_arguments(fsync_path, each) for each in others
            ]
            sync_at_once(with_arguments(count, sync) for sync in syncs)
        else:
            for file, _ in exported.files:
                file.show()
            at_end.pop_all()
    sums = exported.sums.by_tensor()
    return [_report(file, exports, sums) for file, exports in exported.files] + [
        {**checksum_file(path).model_dump(), "tensors": "{}", "tensor_bytes": 0} for path in others
    ]


def _sync_files(exported: _Exported) -> str:
    """Sync and close this rank's files of an early version. Return the error for rank 0, if any."""
    try:
        with exported.opened:
            sync_at_once(exported.syncs())
    except OSError as error:
        return json.dumps([error.errno, str(error)])
    return ""


def _make_durable(
    partial: PartialVersion, exported: _Exported, small: list[str], later: LaterResults
) -> None:
    """Sync an early version on rank 0: its files, the `small` ones, and those of other ranks.

    After an `OSError`, the version is gone."""
    syncs = exported.syncs()
    syncs += [with_arguments(fsync_path, partial.final / name) for name in small]
    with exported.opened:
        partial.make_durable([*syncs, lambda: _wait_for_other_ranks(later)])


def _wait_for_other_ranks(later: LaterResults) -> None:
    """Raise the first `OSError` of the other ranks' syncs."""
    for rank, result in enumerate(later.wait_for_others(seconds=STALLED_AFTER), start=1):
        if result:
            number, message = json.loads(result)
            raise OSError(number, f"rank {rank}: {message}")


def _write_small_files(partial: PartialVersion, trainer: RankTrainer) -> list[Path]:
    backend, base = trainer.backend, trainer.base
    if not (lora := backend.training.lora):
        return copy_small_files(base.path, partial.path, dtype=backend.dtype)
    record, targets = read_model_record(base.path), backend.adapter_targets()
    config = AdapterConfig(
        base_model=record.repository if record else base.name,
        revision=record.commit if record else None,
        rank=lora.rank,
        alpha=lora.alpha,
        targets=targets,
    )
    card = partial.path / CARD_NAME
    card.write_text(
        adapter_card(base=config.base_model, lora=lora, targets=targets, tied=ties_head(base.path))
    )
    copies = copy_small_files(base.path, partial.path, adapter=True)
    return [*copies, config.write_config(partial.path), card]


def _report(
    file: HashedFile, exports: Sequence[Export], sums: Mapping[str, int]
) -> dict[str, str | int]:
    """`tensors` has the file's tensors with their sums, or null without one."""
    return {
        **file.entry().model_dump(),
        "tensors": json.dumps({each.name: sums.get(each.name) for each in exports}),
        "tensor_bytes": sum(export.bytes for export in exports),
    }


def name_files(
    exports: Sequence[Export], owners: Mapping[str, int], *, ranks: int, writers: int = 1
) -> list[dict[str, list[Export]]]:
    """The files of each rank, by rank, with at most `FILE_BYTES`, in the order of export.

    A single rank may have several `writers`, which get a file each."""
    sizes = [export.bytes for export in exports]
    most = FILE_BYTES if writers == 1 else min(FILE_BYTES, sum(sizes) // writers + max(sizes))
    files: list[list[list[Export]]] = [[] for _ in range(ranks)]
    filled = [0] * ranks  # bytes of each rank's last file
    for export in exports:
        rank = owners[export.unit]
        filled[rank] += export.bytes
        if not files[rank] or filled[rank] > most:
            files[rank].append([])
            filled[rank] = export.bytes
        files[rank][-1].append(export)
    count, numbers = sum(map(len, files)), itertools.count(1)
    return [
        {
            f"model-{next(numbers):05d}-of-{count:05d}.safetensors"
            if count > 1
            else "model.safetensors": tensors
            for tensors in mine
        }
        for mine in files
    ]


def compute_canary(trainer: RankTrainer) -> Canary:
    """The logprobs of a fixed pseudo-random sequence under the current weights."""
    backend, facts = trainer.backend, trainer.backend.facts
    length = min(CANARY_TOKENS, facts.max_length or CANARY_TOKENS)
    tokens = np.random.default_rng(17).integers(0, facts.vocabulary, length)
    shown = tokens[None, :-1]
    batch = MicroBatch(
        tokens=shown,
        targets=tokens[None, 1:, None],
        select=None,
        entries=np.arange(length - 1),
        inputs={},
    )

    def compute() -> list[float]:
        logprobs: list[float] = backend.logprobs(batch, gradients=False).cpu().tolist()
        return logprobs

    # Threads inside of operations on so few tokens would mostly wait for each other.
    logprobs = trainer.parallel.run_work(compute) if trainer.parallel else compute()
    return Canary(tokens=tokens.tolist(), logprobs=logprobs)


def _writer(name: str, exports: Sequence[Export]) -> TensorWriter:
    return TensorWriter(
        {
            export.name: StoredTensor(
                file=Path(name),
                name=export.name,
                dtype=STORED_TYPES[str(export.dtype)],
                shape=export.shape,
                start=place,
                bytes=export.bytes,
            )
            for place, export in enumerate(exports)
        }
    )


def _write_tensors(
    file: HashedFile, exports: Sequence[Export], tensors: Iterator[tuple[str, Tensor]]
) -> None:
    """Write one safetensors file. The library ignores errors of close, where NFS reports failed
    writes."""
    writer, copies = _writer(file.name, exports), HostCopies()
    file.write(writer.header)
    for tensor in _in_order(writer.order, tensors):
        for content in copies.pieces(tensor):
            file.write(content)


def _writers(device: str, exports: Sequence[Export]) -> int:
    """The number of threads that write a single rank's files.

    Threads of small files would mostly wait for Python's lock, beside that of the canary."""
    cores = torch.get_num_threads() if device == "cpu" else len(os.sched_getaffinity(0))
    files = sum(export.bytes for export in exports) // LEAST_BYTES
    return max(1, min(_MOST_WRITERS, cores, files))


def _in_order(order: Sequence[str], tensors: Iterator[tuple[str, Tensor]]) -> Iterator[Tensor]:
    """The tensors in the file's order. Early ones wait for their turn."""
    early: dict[str, Tensor] = {}
    for awaited in order:
        while awaited not in early:
            name, tensor = next(tensors)
            early[name] = tensor if name == awaited else tensor.clone()
        yield early.pop(awaited)


def _manifest(
    request: VersionRequest,
    partial: PartialVersion,
    written: list[dict[str, str | int]],
    *,
    canary: Canary,
    trainer: RankTrainer,
) -> tuple[Manifest, list[Path]]:
    """Return the manifest, and the index of several files, which is not synced yet."""
    entries = [FileEntry.model_validate(item) for item in written]
    weight_map, sums = {}, {}
    for item in written:
        for tensor, value in json.loads(str(item["tensors"])).items():
            weight_map[tensor] = str(item["name"])
            if value is not None:
                sums[tensor] = value
    unsynced = []
    if len({*weight_map.values()}) > 1:
        total = sum(int(item["tensor_bytes"]) for item in written)
        index = write_index(partial.path, weight_map=weight_map, total_bytes=total)
        entries.append(checksum_file(index))
        unsynced.append(index)
    lora = trainer.backend.training.lora
    manifest = Manifest(
        version=request.name,
        run_id=request.run_id,
        step=request.step,
        parent=request.parent,
        operation=request.operation,
        adapter=lora is not None,
        dtype="float32" if lora else trainer.backend.dtype,
        tensors=len(weight_map),
        sums=sums,
        created=datetime.now(UTC).isoformat(),
        files=entries,
        canary=canary,
    )
    return manifest, unsynced


def assign_owners(exports: Sequence[Export], *, ranks: int) -> dict[str, int]:
    """The owner of each unit: largest first, each to the rank with the fewest bytes so far.

    Example: with units a, b and c of 5, 3 and 3 bytes, two ranks get `{"a": 0, "b": 1, "c":
    1}`."""
    sizes: dict[str, int] = {}
    for export in exports:
        sizes[export.unit] = sizes.get(export.unit, 0) + export.bytes
    loads = [(0, rank) for rank in range(ranks)]
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = loads[0]
        owners[name] = rank
        heapq.heapreplace(loads, (load + sizes[name], rank))
    return owners
