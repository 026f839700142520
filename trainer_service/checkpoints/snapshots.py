"""Snapshots of a training run: what a crashed trainer is restored from.

A snapshot is taken right after an optimizer step, when there are no gradients. Each rank copies its
part of the state to host memory, which is the only pause, and writes it in a thread while training
goes on. The files are those of a checkpoint (`training_state`).
"""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from tandem.errors import InternalError, ServerError, TandemError
from tandem.telemetry import get_log
from tandem.v1 import trainer_pb2
from trainer_service.checkpoints import training_state
from trainer_service.checkpoints.storage import storage_error
from trainer_service.checkpoints.training_state import CheckpointRecord
from trainer_service.compute.trainer import RankTrainer

_NICENESS = 5
"""Of the thread that writes, so that it yields to training where cores are few."""


class Snapshots:
    """The snapshots of one rank. `group` is for them alone, since they are written while other
    collectives go on; None for a single rank."""

    def __init__(self, trainer: RankTrainer, *, group: dist.ProcessGroup | None) -> None:
        self._trainer = trainer
        self._group = group
        self._thread = ThreadPoolExecutor(1, "snapshots", initializer=_yield_to_training)
        self._path = ""
        self._newest: Future[trainer_pb2.AwaitSnapshotReply] = Future()
        self._log = get_log()

    def prepare(self, request: trainer_pb2.OptimStepRequest) -> None:
        """Make the folder of the snapshot that a step asks for, on rank 0, before the step is
        announced. Where it cannot be made, the step goes on without a snapshot."""
        path = Path(request.snapshot)
        if not request.snapshot:
            return
        if self._path and not self._newest.done():  # one at a time, so that copies do not queue
            request.snapshot = ""
            return
        self._path, self._newest = request.snapshot, Future()
        try:
            training_state.prepare_save(path, self._trainer.backend)
        except (TandemError, OSError) as error:
            self._fail(error)
            request.snapshot = ""

    def take(self, request: trainer_pb2.OptimStepRequest) -> None:
        """Copy the state after a step, and begin to write it if the step asks for that. All ranks
        call it alike."""
        if not request.snapshot:
            return
        began, trainer = time.perf_counter(), self._trainer
        live = training_state.state_of(trainer.backend)
        record = training_state.describe(trainer, live, request.header)
        copied = BlockingAsyncStager().stage(live)
        pause = time.perf_counter() - began

        def write() -> trainer_pb2.AwaitSnapshotReply:
            return self._write(copied, record, path=Path(request.snapshot), pause=pause)

        newest = self._newest
        self._thread.submit(write).add_done_callback(lambda written: self._end(written, newest))

    def abandon(self, request: trainer_pb2.OptimStepRequest) -> None:
        """Remove what `prepare` made, on rank 0, for a step that was not applied."""
        if request.snapshot:
            shutil.rmtree(training_state.partial_path(Path(request.snapshot)), ignore_errors=True)
            self._fail(InternalError("the step was not applied"))

    def result(self, path: str) -> Future[trainer_pb2.AwaitSnapshotReply]:
        """Return, on rank 0, what becomes of the snapshot that was asked for last."""
        if path == self._path:
            return self._newest
        unknown: Future[trainer_pb2.AwaitSnapshotReply] = Future()
        error = InternalError(f"{Path(path).name} is not the newest snapshot")
        unknown.set_result(trainer_pb2.AwaitSnapshotReply(failure=error.to_failure()))
        return unknown

    def _write(
        self,
        state: dict[str, object],
        record: CheckpointRecord,
        *,
        path: Path,
        pause: float,
    ) -> trainer_pb2.AwaitSnapshotReply:
        began = time.perf_counter()
        partial = training_state.partial_path(path)
        try:
            training_state.write_shards(state, partial, group=self._group)
            if self._trainer.control.rank:
                return trainer_pb2.AwaitSnapshotReply()
            record = training_state.commit(record, path)
        except (OSError, ServerError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            return _failed(error)
        return trainer_pb2.AwaitSnapshotReply(
            seq_id=record.last_seq_id,
            step=record.step,
            bytes=record.bytes,
            pause_seconds=pause,
            seconds=time.perf_counter() - began,
        )

    def _fail(self, error: TandemError | OSError) -> None:
        """Tell whoever waits that there will be no snapshot."""
        self._newest.set_result(_failed(error))

    def _end(
        self,
        written: Future[trainer_pb2.AwaitSnapshotReply],
        newest: Future[trainer_pb2.AwaitSnapshotReply],
    ) -> None:
        """Tell whoever waits. A fault of ours is logged; training goes on without a snapshot."""
        if (fault := written.exception()) is None:
            reply = written.result()
        else:
            self._log.error("snapshot_failed", exc_info=fault)
            error = InternalError(f"{type(fault).__name__} while a snapshot was written")
            reply = trainer_pb2.AwaitSnapshotReply(failure=error.to_failure())
        if not self._trainer.control.rank:
            newest.set_result(reply)


def _failed(error: TandemError | OSError) -> trainer_pb2.AwaitSnapshotReply:
    if isinstance(error, OSError):
        error = storage_error(error, what="a snapshot", needed=0)
    return trainer_pb2.AwaitSnapshotReply(failure=error.to_failure())


def _yield_to_training() -> None:
    with suppress(AttributeError, OSError):  # Linux alone has priorities of threads
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
