"""What is done again and again: sessions without heartbeat, idle samplers, old results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.core import Gateway
from tandem.telemetry import get_log

_HOUSEKEEPING_INTERVAL = 30.0
_WORKER_ROWS_KEPT = 7 * 86_400.0


class Housekeeping:
    """Level-triggered: each round looks at what is, and a round that failed is logged and
    leaves its work to the next."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._in_use: set[str] = set()
        self._log = get_log()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Does its rounds until the end of the block."""
        task = asyncio.create_task(self._run(), name="housekeeping")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        interval = self._gateway.settings.reaper_interval
        next_housekeeping = 0.0
        while True:
            try:
                await self.expire_sessions()
                self.sweep_futures()
                self._gateway.usage.write()
                self._gateway.keys.write_uses()
                self._gateway.runs.save_request_times()
                await self.expire_checkpoints()
                if time.monotonic() >= next_housekeeping:
                    next_housekeeping = time.monotonic() + _HOUSEKEEPING_INTERVAL
                    await self.keep_house()
            except Exception:  # noqa: BLE001 - the reaper must outlive one bad round
                self._log.exception("reaper_round_failed")
            await asyncio.sleep(interval)

    async def expire_sessions(self) -> None:
        """Ends the sessions whose heartbeats stopped."""
        sessions = self._gateway.sessions
        await asyncio.gather(
            *(
                self._gateway.end_session(
                    session_id=session.id,
                    state="expired",
                    reason="expired",
                    detail=sessions.expired_reason(session),
                )
                for session in sessions.overdue()
            )
        )

    def sweep_futures(self) -> None:
        """Gives up results that were fetched, or that nobody wants."""
        gone = self._gateway.futures.sweep()
        self._gateway.completions.sweep()
        self._gateway.journal.forget(
            future.request_id
            for future in gone
            if future.source == "operation" and future.fetched_at is not None
        )

    async def expire_checkpoints(self) -> None:
        """Takes the names of expired checkpoints away, and removes the files of what lost its
        name since the last round, as far as nothing uses them."""
        await self._gateway.checkpoints.expire()
        await self._collect(self._gateway.checkpoints.take_marked())

    async def keep_house(self) -> None:
        """Idle sampling sessions, unnamed versions, what was still in use, expired results."""
        gateway = self._gateway
        touched = self._in_use | set(gateway.sampling.expire_idle())
        touched.update(run.id for run in gateway.runs.all() if run.published)
        await self._collect(sorted(touched))
        await gateway.collector.empty_trash()
        gateway.journal.expire()
        await gateway.traces.expire()
        gateway.audit.forget_before(time.time() - gateway.settings.audit_ttl)
        gateway.fleet.forget_rows_before(time.time() - _WORKER_ROWS_KEPT)

    async def _collect(self, run_ids: list[str]) -> None:
        self._in_use.update(run_ids)  # should this fail, it is done at the next house-keeping
        for run_id in run_ids:
            if await self._gateway.collect(run_id):
                self._in_use.discard(run_id)
