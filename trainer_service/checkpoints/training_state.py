"""Checkpoints: weights, optimizer state and counters, in files of the format of `shards`.

A checkpoint can be loaded into another number of ranks. `checkpoint.json` with checksums is written
last. A LoRA run's checkpoint holds only the adapter and identifies its base model by a fingerprint.
Training draws no random numbers, so there is no generator state. Snapshots have the same format."""

from __future__ import annotations

import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tandem.errors import CheckpointDamaged, CheckpointMismatch, NameTaken, ServerError, describe
from tandem.protocol.worker import LoraSpec
from tandem.v1 import common_pb2, trainer_pb2
from tandem.weights import FileEntry, checksum_file
from tandem.weights.state_record import RECORD_NAME, CheckpointRecord
from tandem.weights.store import (
    check_own_file,
    give_name,
    make_folder,
    read_again,
    read_record,
    sync_name,
    write_synced,
)
from trainer_service.backends.base import TrainerBackend
from trainer_service.checkpoints.shards import Layout, ShardReader, ShardWriter, read_layout
from trainer_service.checkpoints.storage import (
    ByteCount,
    agree,
    check_free_space,
    storage_error,
    together,
)
from trainer_service.compute.control_group import Op
from trainer_service.compute.trainer import RankTrainer

if TYPE_CHECKING:
    from torch import Tensor


_MOST_STATES = 3
"""The most tensors that an optimizer has for one parameter."""


def partial_path(path: Path) -> Path:
    return path.parent / f".partial-{path.name}"


def prepare_save(path: Path, backend: TrainerBackend) -> None:
    """Make the partial directory, on rank 0, before the announcement.

    Raises `NameTaken`, `StorageFull` or `PublishFailed`."""
    needed = _bytes_needed(backend)
    what = f"checkpoint {path.name}"
    partial = partial_path(path)
    try:
        if path.exists():
            raise NameTaken(f"the checkpoint {path.name} exists already")
        check_free_space(path, what=what, needed=needed)
        if partial.exists():  # left by a trainer that died while writing it
            shutil.rmtree(partial)
        make_folder(partial)
    except OSError as error:
        raise storage_error(error, what=what, needed=needed) from error


def saved_by(request: trainer_pb2.SaveCheckpointRequest) -> CheckpointRecord | None:
    """Return the checkpoint that this operation wrote before its trainer died, if any.

    Raises `StorageFull` or `PublishFailed`."""
    path = Path(request.path)
    try:
        record = _read_record(path)
    except (OSError, CheckpointDamaged):
        return None
    ours = (request.header.run_id, request.header.seq_id)
    if not all(ours) or (record.run_id, record.last_seq_id) != ours:
        return None
    try:
        sync_name(path)
    except OSError as error:
        raise storage_error(error, what=f"checkpoint {path.name}", needed=0) from error
    return record


def save(
    request: trainer_pb2.SaveCheckpointRequest, trainer: RankTrainer
) -> CheckpointRecord | None:
    """Write this rank's part. Rank 0 commits and returns the record.

    After `StorageFull` or `PublishFailed` nothing is left of the checkpoint."""
    path, control = Path(request.path), trainer.control
    partial, what = partial_path(path), f"checkpoint {path.name}"
    needed = _bytes_needed(trainer.backend)
    state = state_of(trainer.backend)

    def write() -> list[dict[str, str | int]]:
        files = write_shards(state, partial, group=control.group)
        return [entry.model_dump() for entry in files]

    try:
        entries = agree(control, write, what=what, needed=needed)
        if control.rank:
            return None
        files = [FileEntry.model_validate(entry) for entry in entries]
        return commit(record_of(trainer, state, request.header), path, files=files)
    except ServerError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise storage_error(error, what=what, needed=needed) from error


def write_shards(
    state: dict[str, Tensor], partial: Path, *, group: dist.ProcessGroup | None
) -> list[FileEntry]:
    """Write this rank's part of the state. Return, on the first rank, the files of all ranks.

    Raises `OSError` on all ranks if one fails."""
    writer = ShardWriter(partial, group=group)
    try:
        with _quiet():
            dcp.save(state, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        # Raised on every rank if any failed, with the failures by rank.
        raise _os_error_in(error) from error
    return writer.files


def record_of(
    trainer: RankTrainer, state: Mapping[str, Tensor], header: common_pb2.OperationHeader
) -> CheckpointRecord:
    backend = trainer.backend
    return CheckpointRecord(
        run_id=header.run_id,
        step=trainer.step,
        last_seq_id=header.seq_id,
        architecture=backend.facts.architecture,
        optimizer=any(name.startswith("optimizer.") for name in state),
        training=backend.training,
        base_model=trainer.base.name,
        base_fingerprint=trainer.base.fingerprint,
        micro_batch_tokens=trainer.micro_batch_tokens,
        parameters=_shapes(backend),
        files=[],
    )


def commit(record: CheckpointRecord, path: Path, *, files: Sequence[FileEntry]) -> CheckpointRecord:
    partial = partial_path(path)
    record = record.model_copy(update={"files": sorted(files, key=lambda entry: entry.name)})
    write_synced(partial / RECORD_NAME, record.model_dump_json(indent=1).encode())
    give_name(partial, path)
    return record


def check(path: Path, trainer: RankTrainer, *, optimizer: bool) -> CheckpointRecord:
    """Verify a checkpoint before it is loaded.

    Raises `CheckpointDamaged`, or `CheckpointMismatch` for another model, other trained layers, or,
    if `optimizer`, another kind of optimizer. The headers are read first and bound the files' size.
    """
    try:
        record = _read_record(path)
        _match(record, path.name, trainer, optimizer=optimizer)
        layout = read_layout(path, files=_names(record))
        _match_layout(layout, record, path.name, trainer.backend, optimizer=optimizer)
        request = trainer_pb2.LoadCheckpointRequest(path=str(path))
        trainer.control.broadcast(Op.VERIFY_CHECKPOINT, request)
        verify(path, trainer)
    except OSError as error:
        raise CheckpointDamaged(
            f"checkpoint {path.name} cannot be read: {describe(error)}"
        ) from error
    return record


def verify(path: Path, trainer: RankTrainer) -> None:
    """Read this rank's share of the files. Rank 0 raises `CheckpointDamaged` if any is damaged."""
    control, read = trainer.control, ByteCount()

    def block_read() -> None:
        read.bytes += 1  # any progress counts, not its amount

    def compare() -> list[dict[str, str | int]]:
        for entry in _read_record(path).files[control.rank :: control.size]:
            check_own_file(path, entry.name)
            found = read_again(lambda file: checksum_file(file, block_read), path / entry.name)
            if found != entry:
                raise CheckpointDamaged(
                    f"checkpoint {path.name}: {entry.name} is damaged; load another checkpoint"
                )
        return []

    def compare_together() -> list[dict[str, str | int]]:
        try:
            return together(control.group, compare, progress=read)
        except OSError as error:
            raise CheckpointDamaged(
                f"checkpoint {path.name} cannot be read: {describe(error)}"
            ) from error

    agree(control, compare_together, what=path.name, needed=0)


def _match(record: CheckpointRecord, name: str, trainer: RankTrainer, *, optimizer: bool) -> None:
    backend, base = trainer.backend, trainer.base
    theirs, ours = record.training, backend.training
    if _trained_by(theirs.lora) != _trained_by(ours.lora):
        raise CheckpointMismatch(
            f"checkpoint {name} holds {_trained_by(theirs.lora)}, while this run trains "
            f"{_trained_by(ours.lora)}; create a run with the checkpoint's configuration to load it"
        )
    here = _shapes(backend)
    if record.parameters != here:
        odd = sorted(
            tensor
            for tensor in {*record.parameters, *here}
            if record.parameters.get(tensor) != here.get(tensor)
        )
        raise CheckpointMismatch(
            f"checkpoint {name} is of another model ({record.architecture}): {odd[0]} and "
            f"{len(odd) - 1} other tensors do not fit {backend.facts.architecture}"
        )
    if ours.lora and record.base_fingerprint != base.fingerprint:
        raise CheckpointMismatch(
            f"checkpoint {name} is an adapter of the base model {record.base_model}, whose "
            f"weights are not those of {base.name}, which this run trains"
        )
    if optimizer and record.optimizer and theirs.optimizer != ours.optimizer:
        raise CheckpointMismatch(
            f"checkpoint {name} holds the state of the optimizer {theirs.optimizer}, while this "
            f"run uses {ours.optimizer}; load it without the optimizer"
        )


def _match_layout(
    layout: Layout,
    record: CheckpointRecord,
    name: str,
    backend: TrainerBackend,
    *,
    optimizer: bool,
) -> None:
    """Raise `CheckpointDamaged` unless the files hold exactly the state of the record."""
    saved = {tensor: list(each.shape) for tensor, each in layout.items()}
    wanted = {f"model.{tensor}": shape for tensor, shape in record.parameters.items()}
    if optimizer and record.optimizer:
        states = backend.optimizer.state_shapes()
        wanted.update({f"optimizer.{tensor}": list(shape) for tensor, shape in states.items()})
    if odd := sorted(tensor for tensor in wanted if saved.get(tensor) != wanted[tensor]):
        raise CheckpointDamaged(
            f"checkpoint {name} is damaged: {odd[0]} must have the shape {wanted[odd[0]]}, and "
            f"{f'has {saved[odd[0]]}' if odd[0] in saved else 'is missing'}; load another "
            "checkpoint"
        )
    states_of: Counter[str] = Counter()
    for tensor in saved.keys() - wanted.keys():
        parameter = tensor.removeprefix("optimizer.").rpartition(".")[0]
        states_of[parameter] += 1
        if (
            not record.optimizer
            or not tensor.startswith("optimizer.")
            or saved[tensor] not in ([], record.parameters.get(parameter))
            or states_of[parameter] > _MOST_STATES
        ):
            raise CheckpointDamaged(
                f"checkpoint {name} is damaged: {tensor[:100]!r} is no part of its state; load "
                "another checkpoint"
            )


def _trained_by(lora: LoraSpec | None) -> str:
    if lora is None:
        return "all parameters"
    kinds = [kind for kind in ("attention", "mlp", "unembedding") if getattr(lora, kind)]
    return f"LoRA of rank {lora.rank} and alpha {lora.alpha:g} on {', '.join(kinds)}"


def _shapes(backend: TrainerBackend) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in backend.parameters().items()}


def _read_record(path: Path) -> CheckpointRecord:
    """Raises `OSError`, or `CheckpointDamaged` for an invalid record."""
    try:
        record = CheckpointRecord.model_validate_json(read_record(path / RECORD_NAME))
        check_own_file(path, RECORD_NAME)
    except ValueError as error:  # pydantic's error is one
        raise CheckpointDamaged(
            f"the record of checkpoint {path.name} is damaged; load another checkpoint"
        ) from error
    if len(_names(record)) < len(record.files):
        raise CheckpointDamaged(
            f"the record of checkpoint {path.name} names a file twice; load another checkpoint"
        )
    return record


def load(path: Path, trainer: RankTrainer, *, optimizer: bool) -> None:
    """Load this rank's part and set the step counter. Drop gradients.

    Without `optimizer` the optimizer starts anew. After `check`, only the disk can fail here, and
    the error ends the worker."""
    backend, control = trainer.backend, trainer.control
    record = _read_record(path)
    backend.optimizer.reset()
    with_state = optimizer and record.optimizer
    state = state_of(backend, optimizer=with_state, create=with_state)
    with _quiet():
        dcp.load(
            state,
            storage_reader=ShardReader(path, files=_names(record), group=control.group),
            process_group=control.group,
            no_dist=control.size == 1,
        )
    backend.weights_changed()
    trainer.step = record.step


def _names(record: CheckpointRecord) -> set[str]:
    return {entry.name for entry in record.files}


def state_of(
    backend: TrainerBackend, *, optimizer: bool = True, create: bool = False
) -> dict[str, Tensor]:
    """The live tensors of a checkpoint. `create` makes missing optimizer state."""
    state = {f"model.{name}": tensor for name, tensor in backend.parameters().items()}
    if optimizer:
        moments = backend.optimizer.state(create=create)
        state.update({f"optimizer.{name}": tensor for name, tensor in moments.items()})
    return state


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _bytes_needed(backend: TrainerBackend) -> int:
    each = backend.training.state_bytes
    elements = sum(int(tensor.numel()) for tensor in backend.parameters().values())
    return elements * (each.weight + each.moments) + 2**20


def _os_error_in(error: CheckpointException) -> OSError:
    for failure in error.failures.values():
        if isinstance(failure[0], OSError):
            return failure[0]
    return OSError(str(error))
