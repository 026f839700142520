"""Decides when a run's trainer takes a snapshot, and records it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from gateway.runs.recovery.replay_log import Snapshot
from gateway.runs.run import Run
from gateway.runs.tools import RunTools
from gateway.workers.clients import TrainerClient, WorkerUnavailable
from tandem.errors import LimitExceeded, StorageFailed, TandemError, describe, without_paths
from tandem.telemetry import get_log
from tandem.v1 import trainer_pb2

_PAUSE = 60.0
"""Seconds until a failed snapshot is tried again."""


class SnapshotTaker:
    """Takes one run's snapshots, which cover its log. Without a log, it takes none."""

    def __init__(self, *, run: Run, tools: RunTools) -> None:
        self._run = run
        self._snapshots = tools.snapshots
        self._metrics = tools.metrics
        self._task: asyncio.Task[None] | None = None
        self._next_at = 0.0
        self._left_behind: list[str] = []
        self._log = get_log(session_id=run.session_id, run_id=run.id)

    async def folder(self) -> str:
        """Return the folder for a snapshot after the next step, "" for none."""
        log, run = self._run.log, self._run
        if log is None or run.snapshot_asked or time.monotonic() < self._next_at:
            return ""
        if not run.about.trainable_parameters:  # the size is unknown after a restart
            return ""
        if not log.wants_snapshot(expected_bytes=run.expected_state_bytes):
            return ""
        return await self._new_folder(step=run.step + 1)

    def follow(self, client: TrainerClient, folder: str) -> None:
        """Record a snapshot that the trainer has begun."""
        request = trainer_pb2.AwaitSnapshotRequest(path=folder)
        written = self._note(lambda: client.await_snapshot(request), folder)
        self._task = asyncio.create_task(written)

    async def take(self, client: TrainerClient) -> None:
        """Take a snapshot now if it costs less than a replay, and wait for it. The trainer must be
        idle."""
        log, run = self._run.log, self._run
        if self._task is not None:  # it may make another needless
            await asyncio.wait({self._task})
        if log is None or not log.is_worth_snapshot(expected_bytes=run.expected_state_bytes):
            return
        if folder := await self._new_folder(step=run.step):
            request = trainer_pb2.TakeSnapshotRequest(path=folder)
            await self._note(lambda: client.take_snapshot(request), folder)

    async def _new_folder(self, *, step: int) -> str:
        run = self._run
        try:
            run.snapshot_asked = await self._snapshots.new_folder(run, step=step)
        except (LimitExceeded, StorageFailed, OSError) as error:  # training goes on without it
            self._note_none(describe(error))
        return run.snapshot_asked

    async def _note(
        self, written: Callable[[], Awaitable[trainer_pb2.AwaitSnapshotReply]], folder: str
    ) -> None:
        log, run = self._run.log, self._run
        assert log is not None
        useless = [Snapshot(folder=folder)]
        try:
            reply = await written()
            if reply.HasField("failure"):
                self._note_none(reply.failure.message)
                return
            self._metrics.snapshots.labels(outcome="written").inc()
            run.no_snapshot = ""
            snapshot = Snapshot(
                seq_id=reply.seq_id - 1, step=reply.step, folder=folder, bytes=reply.bytes
            )
            self._snapshots.record_snapshot(run, snapshot)
            useless = log.add_snapshot(snapshot, cost=reply.pause_seconds + reply.seconds)
            self._log.info(
                "snapshot",
                step=reply.step,
                bytes=reply.bytes,
                pause_seconds=round(reply.pause_seconds, 4),
                seconds=round(reply.seconds, 4),
            )
        except (WorkerUnavailable, TandemError) as error:
            self._note_none(describe(error))
        finally:
            if run.snapshot_asked == folder:
                run.snapshot_asked = ""
            for each in useless:
                await self._snapshots.remove_snapshot(run, each)

    async def note_saved(self, saved: Snapshot) -> None:
        """Use a client's checkpoint at a step as a snapshot."""
        log, run = self._run.log, self._run
        if log is None:
            return
        try:
            snapshot = await self._snapshots.share(run, saved)
        except OSError as error:
            self._log.info("save_not_shared", reason=describe(error))
            return
        run.no_snapshot = ""
        self._snapshots.record_snapshot(run, snapshot)
        for each in log.add_snapshot(snapshot):
            await self._snapshots.remove_snapshot(run, each)

    def trainer_lost(self) -> None:
        if self._run.snapshot_asked:
            self._left_behind.append(self._run.snapshot_asked)
            self._run.snapshot_asked = ""
            # It may be the cause of death.
            self._note_none("the trainer died while it took one")
        if self._task is not None:
            self._task.cancel()

    async def remove_left(self) -> None:
        for folder in self._left_behind:
            await self._snapshots.remove_snapshot(self._run, Snapshot(folder=folder))
        self._left_behind.clear()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _note_none(self, reason: str) -> None:
        self._next_at = time.monotonic() + _PAUSE
        self._run.no_snapshot = without_paths(reason)
        self._metrics.snapshots.labels(outcome="none").inc()
        self._log.warning("no_snapshot", reason=reason)
