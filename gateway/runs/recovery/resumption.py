"""Resumes runs from an earlier gateway's rows, which are read for many runs at once.

Operations end in order, each in one transaction with its replay data, so the rows show one moment
of the run. Only an operation that waits for a sampler may end later."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sqlalchemy import RowMapping, func, select

from gateway.checkpoints.versions import WeightVersion
from gateway.identifiers import (
    operation_blob,
    parse_checkpoint_path,
    relative_version_folder,
    sampling_session_id_of,
)
from gateway.owners.limits import Quotas
from gateway.runs.dispatcher import why_refused
from gateway.runs.operations import (
    LoadWeights,
    Operation,
    SaveWeightsForSampler,
    body_from_json,
)
from gateway.runs.record.rows import TrainingStep
from gateway.runs.recovery.replay_log import SentCall, Snapshot
from gateway.runs.run import LAST_SEQ_ID, Run
from gateway.runs.tools import RunTools
from gateway.storage.tables import operations, runs
from tandem.errors import SequenceGap, from_type
from tandem.v1 import trainer_pb2

_LARGE = ("payload", "result")
_COLUMNS = [column for column in operations.c if column.name not in _LARGE]


@dataclass(frozen=True, kw_only=True)
class LeftRun:
    """A run's row, and the rows of other tables about it. `operations` are those for a replay and
    the unfinished ones, without payloads. `ended` is the newest ended operation, -1 for none.
    `sampled` is the newest version for samples."""

    row: RowMapping
    snapshots: Sequence[Snapshot]
    operations: Sequence[RowMapping]
    ended: int
    last_step: TrainingStep | None
    sampled: WeightVersion | None


@dataclass(frozen=True)
class RunResumption:
    limits: Quotas
    tools: RunTools

    async def read_runs(self, rows: Sequence[RowMapping]) -> list[LeftRun]:
        """Read the rows of an earlier gateway's runs, in the order of `rows`."""
        ids, read = [row["id"] for row in rows], self.tools.journal.database.read
        inline = func.coalesce(func.length(operations.c.payload), -1).label("inline")
        needed = operations.c.ended_at.is_(None) | operations.c.call.is_not(None)
        found = await read(
            select(*_COLUMNS, inline)
            .where(operations.c.run_id.in_(ids), needed)
            .order_by(operations.c.run_id, operations.c.seq_id)
        )
        of_runs = defaultdict[str, list[RowMapping]](list)
        for each in found:
            of_runs[each["run_id"]].append(each)
        newest_ended = (
            select(operations.c.seq_id)
            .where(operations.c.run_id == runs.c.id, operations.c.ended_at.is_not(None))
            .order_by(operations.c.seq_id.desc())
            .limit(1)
            .scalar_subquery()
        )
        ended = await read(select(runs.c.id, newest_ended.label("ended")).where(runs.c.id.in_(ids)))
        ended_of = {each["id"]: each["ended"] for each in ended if each["ended"] is not None}
        snapshots = await self.tools.snapshots.of_runs(ids)
        last_steps = await self.tools.records.last_steps(ids)
        sampled = await self.tools.versions.find_all([row["newest"] for row in rows])
        return [
            LeftRun(
                row=row,
                snapshots=snapshots.get(run_id, []),
                operations=of_runs[run_id],
                ended=ended_of.get(run_id, -1),
                last_step=last_steps.get(run_id),
                sampled=sampled.get(row["newest"]),
            )
            for run_id, row in zip(ids, rows, strict=True)
        ]

    async def resume_run(self, run: Run, left: LeftRun) -> None:
        log, row = run.log, left.row
        assert log is not None
        run.parent, run.newest = row["parent"], row["newest"]
        self.tools.snapshots.resume(run, left.snapshots)
        newest = left.snapshots[-1] if left.snapshots else Snapshot()
        # The trainer's snapshot may be older than the last step.
        run.step = max(newest.step, left.last_step.step if left.last_step is not None else 0)
        payloads = operation_blob(self.tools.journal.data_dir, run_id=run.id, seq_id=0).parent
        files = await asyncio.to_thread(_sizes_in, payloads)
        calls, waiting = list[SentCall](), list[Operation]()
        for each in left.operations:
            in_file = files.get(each["seq_id"], -1)
            payload = each["inline"] if each["inline"] >= 0 else in_file
            if each["ended_at"] is not None:
                calls.append(_call_of(each, payload))
            else:
                waiting.append(_operation_of(run, each, payload))
        # The newest call that the trainer received: it is in the newest snapshot, dropped from the
        # log, or in the log.
        sent = max([newest.seq_id, row["replay_after"], *(call.seq_id for call in calls)])
        incomplete = await self._why_incomplete(run, sent) if left.ended > sent else ""
        pins = self.tools.checkpoints.pins
        if run.parent:
            pins.pin(relative_version_folder(run.parent))
        for call in calls:
            if call.kind == "load_weights":
                folder = trainer_pb2.LoadCheckpointRequest.FromString(call.request).path
                pins.pin(folder)
                call.release = partial(pins.unpin, folder)
        for operation in waiting:
            self._take_up(operation)
        if run.ending is not None:
            run.last_save = next((each for each in waiting if each.seq_id == LAST_SEQ_ID), None)
            for operation in waiting:
                if operation is not run.last_save:
                    self.tools.journal.end(operation, run.ending.error)
            waiting = []
        run.creation = next((each for each in waiting if each.seq_id == 0), None)
        if run.creation is not None and isinstance(body := run.creation.body, LoadWeights):
            loaded = await self.tools.checkpoints.find(parse_checkpoint_path(body.path))
            if loaded is not None:
                pins.pin_until(run.creation.future.on_end, loaded.folder)
        log.resume(
            snapshots=left.snapshots,
            calls=calls,
            missing_to=row["replay_after"],
            answered=left.ended,
        )
        run.restoring = "the gateway restarted; the trainer starts when its client is heard of"
        run.dispatcher.resume(
            [each for each in waiting if each.seq_id > 0],
            ended=left.ended,
            gradients_incomplete=incomplete,
        )

    async def _why_incomplete(self, run: Run, sent: int) -> str:
        """Explain incomplete gradients: a later forward_backward failed before the trainer
        received it."""
        row = await self.tools.journal.database.read_one(
            select(operations.c.seq_id, operations.c.error_type, operations.c.error)
            .where(
                operations.c.run_id == run.id,
                operations.c.seq_id > sent,
                operations.c.state == "failed",
                (operations.c.kind == "forward_backward")
                | (operations.c.error_type == SequenceGap.type),
            )
            .order_by(operations.c.seq_id.desc())
            .limit(1)
        )
        if row is None:
            return ""
        if row["error_type"] == SequenceGap.type:
            return str(row["error"])
        return why_refused(row["seq_id"], row["error"])

    def _take_up(self, operation: Operation) -> None:
        """Reserve an unfinished operation's resources and pin its output folder."""
        limits, pins = self.limits, self.tools.checkpoints.pins
        held = limits.reserve(
            operation.future.owner,
            (limits.operations, 1),
            (limits.operation_bytes, operation.size),
            forced=True,
        )
        operation.future.on_end(lambda _outcome: held.close())
        if folder := operation.folder:
            pins.pin(folder)
            operation.future.on_end(lambda _outcome: pins.unpin(folder))
        self.tools.journal.futures.add(operation.future)
        body = operation.body
        if isinstance(body, SaveWeightsForSampler) and body.sampling_session_seq_id is not None:
            session_id = operation.run_id.partition(":")[0]
            self.tools.sampling.await_session(
                sampling_session_id_of(session_id=session_id, number=body.sampling_session_seq_id),
                operation.future.done,
            )


def _call_of(row: RowMapping, payload: int) -> SentCall:
    """Return an answered call, from its row and the bytes of its payload (-1: none)."""
    return SentCall(
        seq_id=row["seq_id"],
        kind=row["kind"],
        request=row["call"],
        body=body_from_json(row["kind"], row["request"]),
        size=len(row["call"]) + max(payload, 0),
        has_payload=payload >= 0,
        answered=True,
        seconds=row["seconds"],
        failure=row["error_type"],
        reason=row["error"],
    )


def _operation_of(run: Run, row: RowMapping, payload: int) -> Operation:
    return Operation(
        run_id=run.id,
        seq_id=row["seq_id"],
        kind=row["kind"],
        future=run.new_future(row["seq_id"]),
        body=body_from_json(row["kind"], row["request"]),
        has_payload=payload >= 0,
        size=max(payload, len(row["request"])),
        digest=row["digest"],
        refused=from_type(row["error_type"], row["error"]) if row["error_type"] else None,
        resumed=True,
    )


def _sizes_in(folder: Path) -> dict[int, int]:
    """Return the bytes of each payload in a file, by `seq_id`."""
    if not folder.is_dir():
        return {}
    files = (path for path in folder.iterdir() if path.name.isdecimal())
    return {int(path.name): path.stat().st_size for path in files}
