"""Admits operations to a run: each once, within limits, and into the journal.

Operations of an ended run are accepted and fail with its error, because the SDK repeats a 5xx for
minutes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from weakref import WeakValueDictionary

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from gateway.identifiers import request_id_of, unknown_run
from gateway.owners.limits import Quotas, overloaded
from gateway.runs.journal import Journal
from gateway.runs.operations import Body, Kind, Operation
from gateway.runs.registry import RunRegistry
from gateway.runs.run import Run
from gateway.storage.database import Database
from gateway.storage.futures.table import digest_of
from gateway.storage.tables import runs
from tandem.errors import (
    PLANNED_ENDS,
    GatewayRestarted,
    SessionFinished,
    TandemError,
    from_type,
)

_PAYLOAD_SHARE = 0.5
"""Share of an owner's memory for payloads that need not be read from the disk."""

MOST_QUEUED = 4096


@dataclass(eq=False, repr=False, kw_only=True)
class OperationAdmission:
    runs: RunRegistry
    journal: Journal
    database: Database
    limits: Quotas

    def __post_init__(self) -> None:
        self._arriving: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def submit(
        self,
        *,
        run_id: str,
        seq_id: int,
        kind: Kind,
        body: Body | None = None,
        request: bytes = b"",
        payload: bytes | None = None,
        refused: TandemError | None = None,
    ) -> str:
        """Write an operation into the journal and return its request_id.

        Idempotent: a repeated `seq_id` with an equal request returns the original. A `refused`
        operation fails at its turn. Raises `SequenceTaken` for another request. `UnknownRun`,
        `SessionFinished`, `Overloaded` and `StorageFailed` leave the `seq_id` free."""
        digest = digest_of(kind, request if payload is None else payload)
        run = self.runs.get(run_id)
        if run is None:
            return await self._submit_to_lost(
                run_id=run_id, seq_id=seq_id, kind=kind, digest=digest
            )
        request_id = request_id_of(owner=run_id, seq_id=seq_id)
        # Equal requests take turns: the second finds the first one's row, or continues if that
        # failed.
        async with self._arriving.setdefault(request_id, asyncio.Lock()):
            known = self.journal.futures.get(request_id) is not None
            if known or run.dispatcher.passed(seq_id):
                known |= await self.journal.has(run_id=run_id, seq_id=seq_id, digest=digest)
            if known:
                await self.database.sync()
                return request_id
            if (error := run.why_over) is not None:
                await self.journal.accept_failed(
                    run_id=run_id, seq_id=seq_id, kind=kind, digest=digest, error=error
                )
                return request_id
            # The operation that a run waits for ignores the limits. Without it, the waiting ones
            # would never make room.
            forced = run.dispatcher.awaits(seq_id)
            if not forced:
                self._check_queue(run)
            size = len(request if payload is None else payload)
            in_memory = payload is None or self.limits.held.has_room(
                run.owner, size, share=_PAYLOAD_SHARE
            )
            operation = Operation(
                run_id=run_id,
                seq_id=seq_id,
                kind=kind,
                future=run.new_future(seq_id),
                body=body,
                payload=payload if in_memory else None,
                has_payload=payload is not None,
                size=size,
                digest=digest,
                refused=refused,
            )
            with self.limits.reserve(
                run.owner,
                (self.limits.operations, 1),
                (self.limits.operation_bytes, size),
                (self.limits.held, size if in_memory else 0),
                forced=forced,
            ) as reserved:
                try:
                    await self.journal.accept(operation, payload=payload)
                except IntegrityError:  # in the journal, but not in memory
                    if not await self.journal.take_back(operation, payload=payload):
                        await self.database.sync()
                        return request_id
                release = reserved.take_over().close  # when the operation ends
        operation.future.on_end(lambda _outcome: release())
        run.dispatcher.put(operation)
        await self.database.sync()  # in parallel with the operation
        return request_id

    def _check_queue(self, run: Run) -> None:
        queued, limit = run.dispatcher.queued, MOST_QUEUED
        if queued >= limit:
            self.limits.note_refusal("run_operations")
            raise overloaded(
                f"{queued} operations of this run wait already, {limit} at most",
                limit="run_operations",
                waiting=queued,
                per_second=run.dispatcher.rate,
            )
        if run.makes_room:
            self.limits.note_refusal("recovery_log_bytes")
            raise overloaded(
                "a snapshot is being written, after which there is room for more batches to replay",
                limit="recovery_log_bytes",
                waiting=queued,
                per_second=run.dispatcher.rate,
            )

    async def _submit_to_lost(self, *, run_id: str, seq_id: int, kind: Kind, digest: bytes) -> str:
        """Accept, as failed, an operation of a run that an earlier gateway ended before its
        session."""
        row = await self.database.read_one(
            select(runs.c.error_type, runs.c.reason).where(runs.c.id == run_id)
        )
        if row is None:
            raise unknown_run(run_id)
        error = from_type(row["error_type"], row["reason"])
        if not isinstance(error, (GatewayRestarted, *PLANNED_ENDS)):
            raise SessionFinished(f"training run {run_id} has ended: {row['reason']}")
        await self.journal.accept_failed(
            run_id=run_id, seq_id=seq_id, kind=kind, digest=digest, error=error
        )
        return request_id_of(owner=run_id, seq_id=seq_id)
