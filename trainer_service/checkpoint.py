"""Checkpoints: weights, optimizer state and counters, in torch's distributed format.

A checkpoint can be loaded into another number of ranks. It comes to be like a weight version:
written into a partial directory, `checkpoint.json` with checksums last, one rename. That of a
LoRA run holds the adapter alone, and knows its base model by a fingerprint. There is no state of
a random number generator in it: nothing is drawn while a model is trained.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, ConfigDict, ValidationError
from torch.distributed.checkpoint.api import CheckpointException

from tandem.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    NameTaken,
    ServerError,
)
from tandem.weights import FileEntry, checksum_file
from tandem.weights.store import check_own_file, fsync_path
from tandem.worker import LoraSpec, TrainingSpec
from trainer_service.backends.base import TrainerBackend
from trainer_service.base_model import BaseModelFiles
from trainer_service.checkpoint_reader import CheckpointReader, read_layout
from trainer_service.control import Control
from trainer_service.files import agree, check_free_space, storage_error

if TYPE_CHECKING:
    from torch import Tensor

RECORD_NAME = "checkpoint.json"


class CheckpointRecord(BaseModel):
    """`checkpoint.json`. `parameters` maps each to its whole shape; `optimizer` says whether
    moments are there (none are before the first step); `base_model` and `base_fingerprint` say
    what a LoRA run's adapter belongs to."""

    model_config = ConfigDict(frozen=True)

    format: int = 1
    run_id: str
    step: int
    last_seq_id: int
    architecture: str
    optimizer: bool
    training: TrainingSpec = TrainingSpec()
    base_model: str = ""
    base_fingerprint: str = ""
    parameters: dict[str, list[int]]
    files: list[FileEntry]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)


@dataclass(frozen=True)
class Counters:
    run_id: str
    step: int
    last_seq_id: int


def partial_path(path: Path) -> Path:
    return path.parent / f".partial-{path.name}"


def prepare_save(path: Path, backend: TrainerBackend) -> None:
    """Rank 0, before the others hear of it. Raises `NameTaken`, `StorageFull`, `PublishFailed`."""
    if path.exists():
        raise NameTaken(f"the checkpoint {path.name} exists already")
    needed = _bytes_needed(backend)
    what = f"checkpoint {path.name}"
    check_free_space(path, what=what, needed=needed)
    partial = partial_path(path)
    try:
        if partial.exists():  # of a trainer that died while writing it
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    except OSError as error:
        raise storage_error(error, what=what, path=path, needed=needed) from error


def save(
    path: Path,
    *,
    backend: TrainerBackend,
    control: Control,
    counters: Counters,
    base: BaseModelFiles,
) -> CheckpointRecord | None:
    """All ranks write; rank 0 commits and returns the record, or raises with nothing left."""
    partial, what = partial_path(path), f"checkpoint {path.name}"
    needed = _bytes_needed(backend)
    state = _state(backend, optimizer=True, create=False)

    def write() -> list[dict[str, str | int]]:
        try:
            with _quiet():
                dcp.save(
                    state,
                    checkpoint_id=partial,
                    process_group=control.group,
                    no_dist=control.size == 1,
                )
        except CheckpointException as error:
            # It comes on every rank when any failed, and holds the failures by rank.
            raise _os_error_in(error) from error
        return []

    try:
        agree(control, write, what=what, path=path, needed=needed)
        if control.rank:
            return None
        return _commit(
            path, backend=backend, control=control, counters=counters, base=base, state=state
        )
    except ServerError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise storage_error(error, what=what, path=path, needed=needed) from error


def _commit(
    path: Path,
    *,
    backend: TrainerBackend,
    control: Control,
    counters: Counters,
    base: BaseModelFiles,
    state: Mapping[str, Tensor],
) -> CheckpointRecord:
    partial = partial_path(path)
    entries = []
    for file in sorted(partial.iterdir()):
        fsync_path(file)
        entries.append(checksum_file(file))
        control.beat()  # the other ranks are idle meanwhile
    record = CheckpointRecord(
        run_id=counters.run_id,
        step=counters.step,
        last_seq_id=counters.last_seq_id,
        architecture=backend.facts.architecture,
        optimizer=any(name.startswith("optimizer.") for name in state),
        training=backend.training,
        base_model=base.name,
        base_fingerprint=base.fingerprint() if backend.training.lora else "",
        parameters=_shapes(backend),
        files=entries,
    )
    target = partial / RECORD_NAME
    with target.open("w", encoding="utf-8") as file_:
        file_.write(record.model_dump_json(indent=1))
        file_.flush()
        os.fsync(file_.fileno())
    fsync_path(partial)
    partial.rename(path)
    fsync_path(path.parent)
    return record


def check(
    path: Path,
    *,
    optimizer: bool,
    backend: TrainerBackend,
    control: Control,
    base: BaseModelFiles,
) -> CheckpointRecord:
    """Verifies a checkpoint before it is loaded. Raises `CheckpointDamaged`, or
    `CheckpointMismatch` when it is of another model, of other layers than this run trains, or
    when its optimizer, if that is wanted, is of another kind."""
    try:
        record = _read_record(path)
        _match(record, path.name, optimizer=optimizer, backend=backend, base=base)
        for entry in record.files:
            check_own_file(path, entry.name)
            if checksum_file(path / entry.name) != entry:
                raise CheckpointDamaged(f"checkpoint {path.name}: {entry.name} is damaged")
            control.beat()  # the other ranks are idle meanwhile
        read_layout(path, files=_names(record))
    except OSError as error:
        raise CheckpointDamaged(f"checkpoint {path.name} cannot be read: {error}") from error
    except ValidationError as error:
        raise CheckpointDamaged(f"the record of checkpoint {path.name} is damaged") from error
    return record


def _match(
    record: CheckpointRecord,
    name: str,
    *,
    optimizer: bool,
    backend: TrainerBackend,
    base: BaseModelFiles,
) -> None:
    """Raises `CheckpointMismatch` that says what differs."""
    theirs, ours = record.training, backend.training
    if _what(theirs.lora) != _what(ours.lora):
        raise CheckpointMismatch(
            f"checkpoint {name} holds {_what(theirs.lora)}, while this run trains "
            f"{_what(ours.lora)}; create a run with the checkpoint's configuration to load it"
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
    if ours.lora and record.base_fingerprint != base.fingerprint():
        raise CheckpointMismatch(
            f"checkpoint {name} is an adapter of the base model {record.base_model}, whose "
            f"weights are not those of {base.name}, which this run trains"
        )
    if optimizer and record.optimizer and theirs.optimizer != ours.optimizer:
        raise CheckpointMismatch(
            f"checkpoint {name} holds the state of the optimizer {theirs.optimizer}, while this "
            f"run uses {ours.optimizer}; load it without the optimizer"
        )


def _what(lora: LoraSpec | None) -> str:
    """What a run trains, as far as it decides whether a checkpoint fits; the seed does not."""
    if lora is None:
        return "all parameters"
    kinds = [kind for kind in ("attention", "mlp", "unembedding") if getattr(lora, kind)]
    return f"LoRA of rank {lora.rank} and alpha {lora.alpha:g} on {', '.join(kinds)}"


def _shapes(backend: TrainerBackend) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in backend.parameters().items()}


def _read_record(path: Path) -> CheckpointRecord:
    return CheckpointRecord.model_validate_json((path / RECORD_NAME).read_bytes())


def load(
    path: Path, *, optimizer: bool, backend: TrainerBackend, control: Control
) -> CheckpointRecord:
    """All ranks load their parts. Without `optimizer` the moments start afresh.

    `check` came before on rank 0, so that what can go wrong here is the disk; the weights are
    then neither old nor new, and the error ends the worker.
    """
    record = _read_record(path)
    backend.optimizer.reset()
    with_moments = optimizer and record.optimizer
    state = _state(backend, optimizer=with_moments, create=with_moments)
    with _quiet():
        dcp.load(
            state,
            storage_reader=CheckpointReader(path, files=_names(record)),
            process_group=control.group,
            no_dist=control.size == 1,
        )
    return record


def _names(record: CheckpointRecord) -> set[str]:
    return {entry.name for entry in record.files}


def _state(backend: TrainerBackend, *, optimizer: bool, create: bool) -> dict[str, Tensor]:
    state = {f"model.{name}": tensor for name, tensor in backend.parameters().items()}
    if optimizer:
        moments = backend.optimizer.state(create=create)
        state.update({f"optimizer.{name}": tensor for name, tensor in moments.items()})
    return state


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns on every call that one process is alone, which is what we ask for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _bytes_needed(backend: TrainerBackend) -> int:
    if backend.training.lora:
        return backend.facts.trainable_parameters * 12 + 2**20
    return sum(backend.tensor_sizes().values()) * 12 + 2**20


def _os_error_in(error: CheckpointException) -> OSError:
    for failure in error.failures.values():
        if isinstance(failure[0], OSError):
            return failure[0]
    return OSError(str(error))
