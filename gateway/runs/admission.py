"""How an operation gets into the log of its run: each place once, and logged before promised."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from gateway.fair_queue import FairSemaphore
from gateway.futures.table import Future, FutureTable
from gateway.identifiers import request_id_of
from gateway.limits.ledger import wait_for_room
from gateway.limits.quotas import Quotas, give_back
from gateway.runs.journal import Journal
from gateway.runs.operations import Body, Kind, Operation
from gateway.runs.registry import RunRegistry
from gateway.sessions.registry import SessionRegistry
from gateway.storage.database import Database
from gateway.storage.tables import runs
from tandem.errors import (
    GatewayRestarted,
    Overloaded,
    SessionFinished,
    TandemError,
    UnknownRun,
)

_SMALL_PAYLOAD = 64 * 1024
"""Payloads up to this size stay in memory while their owner has room there; others are read
again when their turn comes."""
_READS = 4
"""Payloads that are read at once; owners take turns."""


class Admission:
    def __init__(
        self,
        *,
        database: Database,
        log: Journal,
        futures: FutureTable,
        runs: RunRegistry,
        sessions: SessionRegistry,
        limits: Quotas,
        max_queued: int,
    ) -> None:
        self._database = database
        self._oplog = log
        self._futures = futures
        self._runs = runs
        self._sessions = sessions
        self._limits = limits
        self._max_queued = max_queued
        self._reads = FairSemaphore(slots=_READS)

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
        """Takes an operation into the log and returns its request_id.

        A `seq_id` seen before gives the request_id of then. `refused` makes an operation that
        takes its place and fails at its turn. Raises `UnknownRun`, `SessionFinished` or
        `Overloaded`, which take no place.
        """
        run = self._runs.get(run_id)
        request_id = request_id_of(owner=run_id, seq_id=seq_id)
        if run is None:
            return await self._submit_to_lost(run_id=run_id, seq_id=seq_id, kind=kind)
        run.last_request_at = time.time()
        await run.arrived(seq_id)  # the same request, sent before; should it fail, this one goes
        # In an ended run, whatever still has a future (or a row) was accepted before.
        if self._futures.get(request_id) is not None or run.dispatcher.consumed(seq_id):
            return request_id
        owner = self._sessions.owner_of(run.session_id)
        # Of what a run waits for, one more is let in whatever the bounds say: without it, all
        # that is there already could not move, and its places would never become free.
        forced = run.dispatcher.awaits(seq_id)
        queued = run.dispatcher.queued
        if queued >= self._max_queued and not forced:
            self._limits.note_refusal("run_operations")
            seconds = wait_for_room(run.dispatcher.rate, waiting=queued)
            raise Overloaded(
                f"{queued} operations of this run wait already, {self._max_queued} at most "
                f"(TANDEM_MAX_QUEUED_OPERATIONS); ask again in {seconds:g} s",
                limit="run_operations",
                retry_after=seconds,
                position=queued + 1,
            )
        size = len(request if payload is None else payload)
        in_memory = payload is None or (
            size <= _SMALL_PAYLOAD and self._limits.held.has_room(owner, size)
        )
        leases = self._limits.take_operation(
            owner, size=size, held=size if in_memory else 0, forced=forced
        )
        future = Future(
            request_id=request_id,
            source="operation",
            kind=kind,
            owner=owner,
            describe=lambda: run.dispatcher.describe(seq_id),
        )
        arrival = run.arriving[seq_id] = asyncio.get_running_loop().create_future()
        try:
            blob = await self._oplog.accept(
                run_id=run_id,
                seq_id=seq_id,
                kind=kind,
                request=request,
                payload=payload,
                owner=owner,
            )
        except IntegrityError:  # the log has this place, of longer ago than memory goes
            give_back(leases)
            return request_id
        except BaseException:
            give_back(leases)
            raise
        finally:
            del run.arriving[seq_id]
            arrival.set_result(None)
        self._futures.add(future)
        future.on_end(lambda _outcome: give_back(leases))
        run.dispatcher.put(
            Operation(
                run_id=run_id,
                seq_id=seq_id,
                kind=kind,
                future=future,
                body=body,
                payload=payload if in_memory else None,
                blob=blob,
                refused=refused,
                size=size,
                turn=lambda: self._reads.turn(owner),
            )
        )
        return request_id

    async def _submit_to_lost(self, *, run_id: str, seq_id: int, kind: Kind) -> str:
        """For a run that memory does not hold: one that a restart of the gateway ended."""
        row = await self._database.read_one(select(runs).where(runs.c.id == run_id))
        if row is None:
            raise UnknownRun(f"there is no training run {run_id!r} on this server")
        if row["error_type"] != GatewayRestarted.type:
            raise SessionFinished(f"training run {run_id} has ended: {row['reason']}")
        request_id = request_id_of(owner=run_id, seq_id=seq_id)
        if await self._oplog.recall(request_id) is None:
            with suppress(IntegrityError):  # the same request came twice, at once
                await self._oplog.accept(
                    run_id=run_id, seq_id=seq_id, kind=kind, request=b"", payload=None
                )
            self._oplog.end(
                run_id=run_id,
                seq_id=seq_id,
                outcome=GatewayRestarted(row["reason"]),
                blob=None,
            )
        return request_id
