"""The files of a weight version: their names, their tensors and their writing."""

from __future__ import annotations

import heapq
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial as with_arguments
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tandem.weights import PartialVersion, checksum_file
from tandem.weights.adapter_files import AdapterConfig
from tandem.weights.card import CARD_NAME, adapter_card
from tandem.weights.layout import TensorWriter, copy_small_files
from tandem.weights.model_files import ties_head
from tandem.weights.model_store import read_record as read_model_record
from tandem.weights.store import fsync_path, in_threads, sync_at_once
from tandem.weights.sums import TensorSums
from tandem.weights.tensors import STORED_TYPES, StoredTensor
from trainer_service.backends.base import Export
from trainer_service.checkpoints.host_copies import HostCopies
from trainer_service.checkpoints.storage import FILE_BYTES, ByteCount, HashedFile
from trainer_service.compute.trainer import RankTrainer

if TYPE_CHECKING:
    from torch import Tensor

_MOST_WRITERS = 8
LEAST_BYTES = 64 * 2**20
"""Of a file for a writer of its own."""
Entry = dict[str, str | int]
"""A file's entry for the manifest, with its tensors."""


@dataclass(frozen=True)
class ExportedFiles:
    """A rank's open files of weights, with their tensors, and the error, if it `failed`.

    `unwritten` are the tensors by name, if they are still to be written. They are `summed`
    already, or are then."""

    files: list[tuple[HashedFile, list[Export]]]
    opened: ExitStack
    progress: ByteCount
    sums: TensorSums
    unwritten: Mapping[str, Tensor] = field(default_factory=dict)
    summed: bool = False
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
        write_tensors(file, exports, tensors if self.summed else self.sums.summing(tensors))


def write_files(
    partial: PartialVersion, exported: ExportedFiles, trainer: RankTrainer, *, synced: bool
) -> list[Entry]:
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


def _report(file: HashedFile, exports: Sequence[Export], sums: Mapping[str, int]) -> Entry:
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


def write_tensors(
    file: HashedFile, exports: Sequence[Export], tensors: Iterator[tuple[str, Tensor]]
) -> None:
    """Write one safetensors file. The library ignores errors of close, where NFS reports failed
    writes."""
    writer, copies = _writer(file.name, exports), HostCopies()
    file.write(writer.header)
    for tensor in _in_order(writer.order, tensors):
        for content in copies.pieces(tensor):
            file.write(content)


def writers_of(device: str, exports: Sequence[Export]) -> int:
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
