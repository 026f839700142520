"""Publishes the current weights as a weight version (see `tandem/weights`).

A version is the whole model, or a LoRA run's adapter in PEFT's layout."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial as with_arguments
from pathlib import Path

import numpy as np

from tandem.errors import ServerError, describe
from tandem.weights import Canary, FileEntry, Manifest, PartialVersion, checksum_file
from tandem.weights.adapter_files import WEIGHTS_NAME
from tandem.weights.layout import write_index
from tandem.weights.store import fsync_path, sync_at_once
from tandem.weights.sums import TensorSums
from trainer_service.backends.base import Export, TrainerBackend
from trainer_service.batches.micro_batches import MicroBatch
from trainer_service.checkpoints.handoff import KeptCopy, free_unused
from trainer_service.checkpoints.storage import (
    ByteCount,
    HashedFile,
    agree,
    begin,
    end_together,
    storage_error,
)
from trainer_service.checkpoints.version_files import (
    Entry,
    ExportedFiles,
    assign_owners,
    name_files,
    write_files,
    write_tensors,
    writers_of,
)
from trainer_service.checkpoints.version_requests import (
    Published,
    VersionRequest,
    bytes_needed,
)
from trainer_service.compute.control_group import LaterResults
from trainer_service.compute.trainer import RankTrainer

CANARY_TOKENS = 16
_SYNCED_WITHIN = 1800.0
"""Seconds of another rank's syncs, which report no progress."""


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
    written = begin(lambda: write_files(partial, exported, trainer, synced=not early))
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

        def make_durable() -> Manifest:
            _make_durable(partial, exported, small, later)
            return manifest

        return Published(manifest, make_durable)
    except (ServerError, OSError) as error:
        if written.done():  # otherwise a file would wait for its hanging writer
            exported.opened.close()
        partial.discard()
        if isinstance(error, ServerError):
            raise
        raise storage_error(error, what=request.name, needed=needed) from error


def hand_over(request: VersionRequest, trainer: RankTrainer, copy: KeptCopy) -> Published:
    """Copy the weights of a single rank, and return before their files are written.

    `make_durable` writes them from the copy. The partial version exists already."""
    backend = trainer.backend
    sums, exports = TensorSums(backend.dtype), list(backend.exports())
    for _ in sums.summing(copy.copying(backend.export_weights({each.unit for each in exports}))):
        pass
    canary, copied = compute_canary(trainer), copy.tensors()
    manifest = _describe(
        request, trainer, tensors=len(exports), sums=sums.by_tensor(), canary=canary
    )

    def write() -> Manifest:
        partial, opened = PartialVersion(request.path), ExitStack()
        writing: Future[list[Entry]] | None = None
        try:
            exported = ExportedFiles([], opened, ByteCount(), sums, copied, summed=True)
            for name, its in _files_of_one_rank(backend, exports).items():
                file = HashedFile(partial.path / name, progress=exported.progress)
                exported.files.append((opened.enter_context(closing(file)), its))
            writing = begin(lambda: write_files(partial, exported, trainer, synced=True))
            entries = end_together(None, writing, progress=exported.progress)
            written, index = _manifest(request, partial, entries, canary=canary, trainer=trainer)
            partial.commit(written, unsynced=index)
            return written
        except BaseException:
            partial.discard()
            raise
        finally:
            if writing is None or writing.done():  # otherwise a file would wait for its writer
                opened.close()
            copied.clear()
            free_unused(backend.device)

    return Published(manifest, write)


def _export(
    request: VersionRequest, partial: PartialVersion, trainer: RankTrainer, copy: KeptCopy | None
) -> ExportedFiles:
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
            writers = writers_of(backend.device, exports)
        files = name_files(exports, owners, ranks=control.size, writers=writers)[control.rank]
        units = {unit for unit, rank in owners.items() if rank == control.rank}
        tensors = backend.export_weights(units)
        if copy is not None:
            tensors = copy.copying(tensors)
        if writers == 1:
            tensors = sums.summing(tensors)
    exported = ExportedFiles([], ExitStack(), ByteCount(), sums)
    try:
        for name, exports in files.items():
            file = HashedFile(partial.path / name, progress=exported.progress)
            exported.files.append((exported.opened.enter_context(closing(file)), exports))
            if writers == 1:
                write_tensors(file, exports, tensors)
        return replace(exported, unwritten=dict(tensors))
    except OSError as error:
        return replace(exported, failed=error)
    finally:
        for _ in tensors:  # after an error too: the other ranks wait for this one to gather them
            pass
    return exported


def _files_of_one_rank(
    backend: TrainerBackend, exports: Sequence[Export]
) -> dict[str, list[Export]]:
    writers = writers_of(backend.device, exports)
    (files,) = name_files(exports, assign_owners(exports, ranks=1), ranks=1, writers=writers)
    return files


def _sync_files(exported: ExportedFiles) -> str:
    """Sync and close this rank's files of an early version. Return the error for rank 0, if any."""
    try:
        with exported.opened:
            sync_at_once(exported.syncs())
    except OSError as error:
        return json.dumps([error.errno, str(error)])
    except Exception as error:  # noqa: BLE001 (rank 0 waits for an answer)
        return json.dumps([errno.EIO, describe(error, typed=True)])
    return ""


def _make_durable(
    partial: PartialVersion, exported: ExportedFiles, small: list[str], later: LaterResults
) -> None:
    """Sync an early version on rank 0: its files, the `small` ones, and those of other ranks.

    After an `OSError`, the version is gone."""
    syncs = exported.syncs()
    syncs += [with_arguments(fsync_path, partial.final / name) for name in small]
    with exported.opened:
        partial.make_durable([*syncs, lambda: _wait_for_other_ranks(later)])


def _wait_for_other_ranks(later: LaterResults) -> None:
    """Raise the first `OSError` of the other ranks' syncs."""
    for rank, result in later.wait_for_others(seconds=_SYNCED_WITHIN):
        if result:
            number, message = json.loads(result)
            raise OSError(number, f"rank {rank}: {message}")


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


def _manifest(
    request: VersionRequest,
    partial: PartialVersion,
    written: list[Entry],
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
    manifest = _describe(request, trainer, tensors=len(weight_map), sums=sums, canary=canary)
    return manifest.model_copy(update={"files": entries}), unsynced


def _describe(
    request: VersionRequest,
    trainer: RankTrainer,
    *,
    tensors: int,
    sums: dict[str, int],
    canary: Canary,
) -> Manifest:
    """Return the manifest of a version without its files."""
    lora = trainer.backend.training.lora
    return Manifest(
        version=request.name,
        run_id=request.run_id,
        step=request.step,
        parent=request.parent,
        operation=request.operation,
        adapter=lora is not None,
        dtype="float32" if lora else trainer.backend.dtype,
        tensors=tensors,
        sums=sums,
        created=datetime.now(UTC).isoformat(),
        files=[],
        canary=canary,
    )
