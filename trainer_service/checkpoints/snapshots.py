"""Snapshots of a training run, from which a crashed trainer is restored.

A snapshot is the state after a step or a load, without later gradients. Training pauses only while
each rank copies its part to host memory. A thread writes it as a checkpoint (`training_state`)."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tandem.errors import InternalError, ServerError, TandemError, describe
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, trainer_pb2
from tandem.weights.state_record import CheckpointRecord
from trainer_service.checkpoints import training_state
from trainer_service.checkpoints.staging import Copy, staging_of
from trainer_service.checkpoints.storage import storage_error
from trainer_service.compute.trainer import RankTrainer

_NICENESS = 5
"""Of the writing thread, so that it yields to training on few cores."""


def snapshot_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "snapshots", initializer=_yield_to_training)


class Snapshots:
    """The snapshots of one run, on one rank.

    They have their own process group, because other collectives run meanwhile. One thread serves
    all runs, so every rank writes snapshots in the same order."""

    def __init__(self, trainer: RankTrainer, *, thread: ThreadPoolExecutor) -> None:
        self._trainer = trainer
        self._thread = thread
        self._staging = staging_of(trainer.backend.device)
        self._path = ""
        self._newest: Future[trainer_pb2.AwaitSnapshotReply] = Future()
        self._log = get_log()

    def prepare(self, path: str) -> str:
        """Make the folder of a snapshot, on rank 0, before its announcement. Return its path.

        Returns "" if that fails, or if another snapshot is still being written."""
        if not path or (self._path and not self._newest.done()):
            return ""
        self._path, self._newest = path, Future()
        try:
            training_state.prepare_save(Path(path), self._trainer.backend)
        except (TandemError, OSError) as error:
            self._fail(error)
            return ""
        return path

    def take_snapshot(self, path: str, header: common_pb2.OperationHeader) -> None:
        """Copy the state after the operation of `header`. Start writing it to `path`, if any."""
        if not path:
            return
        began, trainer = time.perf_counter(), self._trainer
        live = training_state.state_of(trainer.backend)
        record = training_state.record_of(trainer, live, header)
        copied = self._staging.copy(live)
        pause = time.perf_counter() - began

        def write() -> trainer_pb2.AwaitSnapshotReply:
            try:
                return self._write(copied, record, path=Path(path), pause=pause)
            finally:
                self._staging.end_copy(copied)

        newest = self._newest
        self._thread.submit(write).add_done_callback(lambda written: self._end(written, newest))

    def free(self) -> None:
        self._staging.free()

    def abandon(self, path: str) -> None:
        """Remove the folder from `prepare`, on rank 0, if the step was not applied."""
        if path:
            shutil.rmtree(training_state.partial_path(Path(path)), ignore_errors=True)
            self._fail(InternalError("the step was not applied"))

    def result(self, path: str) -> Future[trainer_pb2.AwaitSnapshotReply]:
        """Return, on rank 0, the result of the last requested snapshot."""
        if path == self._path:
            return self._newest
        unknown: Future[trainer_pb2.AwaitSnapshotReply] = Future()
        error = InternalError(f"{Path(path).name} is not the newest snapshot")
        unknown.set_result(trainer_pb2.AwaitSnapshotReply(failure=error.to_failure()))
        return unknown

    def _write(
        self,
        state: Copy,
        record: CheckpointRecord,
        *,
        path: Path,
        pause: float,
    ) -> trainer_pb2.AwaitSnapshotReply:
        began = time.perf_counter()
        partial = training_state.partial_path(path)
        try:
            group = self._trainer.snapshot_group
            files = training_state.write_shards(state, partial, group=group)
            if self._trainer.control.rank:
                return trainer_pb2.AwaitSnapshotReply()
            record = training_state.commit(record, path, files=files)
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
        self._newest.set_result(_failed(error))

    def _end(
        self,
        written: Future[trainer_pb2.AwaitSnapshotReply],
        newest: Future[trainer_pb2.AwaitSnapshotReply],
    ) -> None:
        """Resolve the result. An internal error is logged, and training continues."""
        if (fault := written.exception()) is None:
            reply = written.result()
        else:
            self._log.error("snapshot_failed", exc_info=fault)
            error = InternalError(f"{describe(fault, typed=True)}, while a snapshot was written")
            reply = trainer_pb2.AwaitSnapshotReply(failure=error.to_failure())
        if not self._trainer.control.rank:
            newest.set_result(reply)


def _failed(error: TandemError | OSError) -> trainer_pb2.AwaitSnapshotReply:
    if isinstance(error, OSError):
        error = storage_error(error, what="a snapshot", needed=0)
    return trainer_pb2.AwaitSnapshotReply(failure=error.to_failure())


def _yield_to_training() -> None:
    with suppress(AttributeError, OSError):  # only Linux has thread priorities
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
