"""The journal: the accepted operations of each run, in order, with their outcomes.

An operation is on the disk, as a row and perhaps a payload file, before its client gets the
request_id. Its payload and call message are removed when no replay needs them (`replay`). The
result stays until its fetch, at most `result_ttl` seconds. The next gateway continues from these
rows (`resumption`)."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sqlalchemy import Executable, and_, bindparam, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from gateway.identifiers import operation_blob, result_blob, run_folder_name, split_request_id
from gateway.metrics import Metrics
from gateway.runs.operations import Kind, Operation, body_to_json
from gateway.runs.recovery.replay_log import Recovery, ReplayLog
from gateway.storage.data_directory import write_file
from gateway.storage.database import Database
from gateway.storage.drivers import typed
from gateway.storage.fair_queue import FairSemaphore
from gateway.storage.futures.table import FutureTable, Outcome, Result
from gateway.storage.tables import operations, runs
from tandem.errors import (
    PLANNED_ENDS,
    GatewayRestarted,
    SequenceTaken,
    TandemError,
    UnknownRequest,
    from_type,
)
from tandem.telemetry import get_log
from tandem.weights.store import read_again

_INLINE_RESULT_BYTES = 64 * 1024
INLINE_PAYLOAD_BYTES = 64 * 1024
"""Larger payloads are files, each with its own sync."""
_READS = 4

_ACCEPT = insert(operations)
_THIS = and_(
    operations.c.run_id == bindparam("this_run"), operations.c.seq_id == bindparam("this_seq")
)
_END = update(operations).where(_THIS).values(payload=None)
_END_HELD = update(operations).where(_THIS)
_DROP = (
    update(operations)
    .where(
        operations.c.run_id == bindparam("this_run"),
        operations.c.seq_id > bindparam("after"),
        operations.c.seq_id <= bindparam("up_to"),
        operations.c.call.is_not(None),
    )
    .values(call=None, payload=None)
)
_REPLAY_AFTER = (
    update(runs).where(runs.c.id == bindparam("this_run")).values(replay_after=bindparam("up_to"))
)
_FORGET = update(operations).where(_THIS).values(result=None, media="")
_OUTCOME = tuple(operations.c[name] for name in ("state", "error_type", "error", "media", "result"))
_NAMES = (operations.c.run_id.label("this_run"), operations.c.seq_id.label("this_seq"))


@dataclass(eq=False, repr=False, kw_only=True)
class Journal:
    """`result_ttl` is in seconds. `futures` holds the operations' futures."""

    database: Database
    data_dir: Path
    futures: FutureTable
    metrics: Metrics
    result_ttl: float

    def __post_init__(self) -> None:
        self._reads = FairSemaphore(slots=_READS)
        self._unwritten: dict[str, Outcome] = {}
        self._replay_logs: dict[str, ReplayLog] = {}
        self._log = get_log()

    def open_log(self, run_id: str, recovery: Recovery) -> ReplayLog:
        """Return a run's new replay log, which keeps payloads from now on."""

        def drop(after: int, up_to: int, with_payload: list[int]) -> None:
            files = [self._file_of(run_id, seq_id) for seq_id in with_payload]
            self._drop(run_id, after=after, up_to=up_to, files=files)

        log = self._replay_logs[run_id] = ReplayLog(recovery, dropped=drop)
        return log

    def forget_run(self, run_id: str) -> None:
        self._replay_logs.pop(run_id, None)
        self._drop(run_id, after=-1, up_to=2**62)  # includes leftovers of a crash

    async def remove_payloads(self, run_id: str) -> None:
        folder = self._file_of(run_id, 0).parent
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _drop(self, run_id: str, *, after: int, up_to: int, files: Sequence[Path] = ()) -> None:
        """Note that no replay returns to these operations, then remove their data. A crash in
        between leaves too much data, not too little."""
        self.database.write_soon(_REPLAY_AFTER, {"this_run": run_id, "up_to": up_to})
        self.database.write_soon(
            _DROP,
            {"this_run": run_id, "after": after, "up_to": up_to},
            after=lambda: _unlink(files),
        )

    async def accept(self, operation: Operation, *, payload: bytes | None) -> None:
        """Write an operation and add its future to the table.

        It then survives this process, and a power failure after `database.sync`. `payload` is the
        protobuf of a forward_backward. Raises `StorageFailed`, or sqlalchemy's `IntegrityError` for
        a known `seq_id`."""
        row, remove_payload = _accepted_row(operation), None
        if payload is not None and len(payload) > INLINE_PAYLOAD_BYTES:
            remove_payload = await self._write_payload(operation, payload)
        else:
            row["payload"] = payload
        await self.database.write(
            _ACCEPT,
            row,
            undo=remove_payload,
            owner=operation.future.owner,
            size=len(payload or b""),
        )
        self.futures.add(operation.future)

    async def take_back(self, operation: Operation, *, payload: bytes | None) -> bool:
        """Add the future of an operation whose write failed after its commit. PostgreSQL may go
        away before it answers.

        Return False if the operation has ended. Raises `SequenceTaken`, or `StorageFailed`."""
        run_id, seq_id = operation.run_id, operation.seq_id
        await self.has(run_id=run_id, seq_id=seq_id, digest=operation.digest)
        row = await self.database.read_one(
            select(operations.c.state).where(
                operations.c.run_id == run_id, operations.c.seq_id == seq_id
            )
        )
        if row is None or row["state"] != "accepted":
            return False
        if payload is not None and len(payload) > INLINE_PAYLOAD_BYTES:
            await self._write_payload(operation, payload)  # the failed write removed it
        self.futures.add(operation.future)
        return True

    async def _write_payload(self, operation: Operation, payload: bytes) -> Callable[[], None]:
        """Write the file of a large payload, and return its removal. Raises `StorageFailed`."""
        file = self._file_of(operation.run_id, operation.seq_id)
        try:
            await asyncio.to_thread(write_file, file, payload, synced=True)
        except OSError as error:
            await asyncio.to_thread(_unlink, [file])
            raise typed(error) from error
        return partial(_unlink, [file])

    async def accept_creation(self, operation: Operation, *, run: Executable) -> None:
        """Write operation 0 and the run's row (`run`) in one transaction."""
        accept = insert(operations).values(_accepted_row(operation))
        await self.database.write_together(run, accept)
        self.futures.add(operation.future)

    async def accept_failed(
        self, *, run_id: str, seq_id: int, kind: Kind, digest: bytes, error: TandemError
    ) -> None:
        """Write a failed operation, unless it exists. Raises `SequenceTaken`."""
        row = _new_row(run_id, seq_id, kind, digest) | {
            "state": "failed",
            "ended_at": time.time(),
            "error_type": error.type,
            "error": error.message,
        }
        try:
            await self.database.write(insert(operations), row)
        except IntegrityError:
            await self.has(run_id=run_id, seq_id=seq_id, digest=digest)

    async def has(self, *, run_id: str, seq_id: int, digest: bytes) -> bool:
        """Return whether the run has an operation with this `seq_id`. Raises `SequenceTaken` if its
        request differs."""
        row = await self.database.read_one(
            select(operations.c.kind, operations.c.digest).where(
                operations.c.run_id == run_id, operations.c.seq_id == seq_id
            )
        )
        if row is not None and row["digest"] != digest:
            raise SequenceTaken(
                f"operation {seq_id} of {run_id} is already another request ({row['kind']}), "
                "which stays as it is: two clients number the operations of one run. Let one "
                "client write to the run, and begin a run from its checkpoint for the other"
            )
        return row is not None

    async def payload_of(self, operation: Operation) -> bytes:
        if operation.payload is not None:
            return operation.payload
        async with self._reads.turn(operation.future.owner):
            return await self.read_payload(operation.run_id, operation.seq_id)

    async def read_payload(self, run_id: str, seq_id: int) -> bytes:
        row = await self.database.read_one(
            select(operations.c.payload).where(
                operations.c.run_id == run_id, operations.c.seq_id == seq_id
            )
        )
        if row is not None and row["payload"] is not None:
            return bytes(row["payload"])
        return await asyncio.to_thread(read_again, Path.read_bytes, self._file_of(run_id, seq_id))

    def end(self, operation: Operation, outcome: Outcome) -> None:
        """Write the outcome and resolve the future, once.

        The client may get a result before its commit, because the next gateway would compute an
        equal one. It gets a failure after the commit, unless the storage fails, because a failure
        might not repeat. Uncommitted outcomes stay in memory, without a body if there is no room.
        """
        future, request_id = operation.future, operation.future.request_id
        if (future.ended and not future.unrecorded) or request_id in self._unwritten:
            return
        if future.unrecorded:
            assert future.outcome is not None
            if isinstance(outcome, TandemError):
                self._log.warning(
                    "ended_after_answer", request_id=request_id, reason=outcome.message
                )
            outcome = future.outcome  # the client has it
            future.unrecorded = False
        error = outcome if isinstance(outcome, TandemError) else None
        labels = {"kind": operation.kind, "outcome": error.type if error else "done"}
        self.metrics.operations.labels(**labels).inc()
        self.metrics.operation_seconds.labels(kind=operation.kind).observe(
            time.monotonic() - future.accepted_at
        )
        ended = partial(future.resolve, outcome)
        if error is None:
            ended()
        else:
            self._log.info(
                "operation_failed",
                run_id=operation.run_id,
                request_id=request_id,
                kind=operation.kind,
                type=error.type,
                reason=error.message,
            )
        row = {
            "this_run": operation.run_id,
            "this_seq": operation.seq_id,
            "state": "failed",
            "ended_at": time.time(),
            "error_type": error.type if error else "",
            "error": error.message if error else "",
            "media": "",
            "result": None,
        }
        write_result, size = None, 0
        if isinstance(outcome, Result):
            row |= {"state": "done", "media": outcome.media}
            size = len(outcome.body)
            if not self.database.has_room(size):
                size = 0
                outcome = UnknownRequest(
                    "the operation was applied, but its result was not kept, because the "
                    "gateway's storage failed"
                )
            elif size <= _INLINE_RESULT_BYTES:
                row["result"] = outcome.body
            else:
                file = result_blob(self.data_dir, request_id=request_id)
                write_result = partial(write_file, file, outcome.body, synced=True)
        statement, remove = _END, None
        log = self._replay_logs.get(operation.run_id)
        call = log.held(operation.seq_id) if log is not None else None
        if call is not None:
            statement, row = _END_HELD, row | {"call": call.request, "seconds": call.seconds}
        elif operation.has_payload and operation.size > INLINE_PAYLOAD_BYTES:
            remove = partial(_unlink, [self._file_of(operation.run_id, operation.seq_id)])
        self._unwritten[request_id] = outcome

        def settled() -> None:
            del self._unwritten[request_id]
            ended()

        self.database.write_soon(
            statement,
            row,
            before=write_result,
            after=remove,
            settled=settled,
            refused=ended,
            size=size,
        )

    async def recall(self, request_id: str) -> Outcome | None:
        """Return an operation's outcome from the journal, None if unknown, `UnknownRequest` if its
        result was removed."""
        named = split_request_id(request_id)
        if named is None:
            return None
        if (outcome := self._unwritten.get(request_id)) is not None:
            return outcome
        run_id, seq_id = named
        row = await self.database.read_one(
            select(*_OUTCOME).where(operations.c.run_id == run_id, operations.c.seq_id == seq_id)
        )
        if row is None:
            return None
        if row["state"] == "failed":
            return from_type(row["error_type"], row["error"])
        if row["state"] == "accepted":
            return GatewayRestarted(
                "the gateway lost the result of this operation while its storage failed; see "
                "with `tandem runs show` whether it was applied"
            )
        if row["result"] is not None:
            return Result(media=row["media"], body=row["result"])
        file = result_blob(self.data_dir, request_id=request_id)
        try:
            size = (await asyncio.to_thread(read_again, Path.stat, file)).st_size
        except OSError:
            return UnknownRequest(f"the result of {request_id} was fetched or has expired")
        return Result(media=row["media"], file=file, file_bytes=size)

    def forget(self, request_ids: Iterable[str]) -> None:
        rows, files = [], []
        for request_id in request_ids:
            if (named := split_request_id(request_id)) is not None:
                rows.append({"this_run": named[0], "this_seq": named[1]})
                files.append(result_blob(self.data_dir, request_id=request_id))
        if rows:
            self.database.write_soon(_FORGET, *rows, after=lambda: _unlink(files))

    async def expire(self) -> None:
        cutoff = time.time() - self.result_ttl
        over = select(*_NAMES).where(
            operations.c.ended_at < cutoff, operations.c.result.is_not(None)
        )
        await self.database.write_in_batches(_FORGET, over)
        await asyncio.to_thread(
            lambda: _unlink(_older_than(self.data_dir / "results", cutoff)),
        )

    async def abandon(self) -> int:
        """Fail an earlier gateway's unfinished operations of ended runs, and remove their payloads.
        Return the number of operations. Those of a planned end get the error of their run."""
        active = select(runs.c.id).where(runs.c.state == "active")
        unfinished = operations.c.ended_at.is_(None) & operations.c.run_id.not_in(active)
        count = await self.database.read_value(
            select(func.count()).select_from(operations).where(unfinished)
        )
        failed = update(operations).values(state="failed", ended_at=time.time(), payload=None)
        planned = runs.c.error_type.in_([error.type for error in PLANNED_ENDS])
        its_run = runs.c.id == operations.c.run_id
        await self.database.write_together(
            failed.where(
                unfinished, operations.c.run_id.in_(select(runs.c.id).where(planned))
            ).values(
                error_type=select(runs.c.error_type).where(its_run).scalar_subquery(),
                error=select(runs.c.reason).where(its_run).scalar_subquery(),
            ),
            failed.where(unfinished).values(
                error_type=GatewayRestarted.type,
                error="the gateway restarted before the end of this operation was recorded; create "
                "the run again, from a checkpoint if there is one",
            ),
        )
        if left := await asyncio.to_thread(lambda: [*(self.data_dir / "operations").glob("*")]):
            rows = await self.database.read(select(runs.c.id).where(runs.c.state != "active"))
            over = {run_folder_name(row["id"]) for row in rows}
            await asyncio.to_thread(_remove, [path for path in left if path.name in over])
        return count

    def _file_of(self, run_id: str, seq_id: int) -> Path:
        return operation_blob(self.data_dir, run_id=run_id, seq_id=seq_id)


def _new_row(run_id: str, seq_id: int, kind: Kind, digest: bytes) -> dict[str, object]:
    return {
        "run_id": run_id,
        "seq_id": seq_id,
        "kind": kind,
        "state": "accepted",
        "request": b"",
        "digest": digest,
        "accepted_at": time.time(),
    }


def _accepted_row(operation: Operation) -> dict[str, object]:
    row = _new_row(operation.run_id, operation.seq_id, operation.kind, operation.digest)
    refused = operation.refused
    return row | {
        "request": body_to_json(operation.body),
        "payload": None,
        "error_type": refused.type if refused is not None else "",
        "error": refused.message if refused is not None else "",
    }


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _older_than(folder: Path, cutoff: float) -> list[Path]:
    if not folder.is_dir():
        return []
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if path.stat().st_mtime < cutoff]


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
