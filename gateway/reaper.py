"""What is done again and again: sessions without heartbeat, idle samplers, old results."""

from __future__ import annotations

import asyncio
import time

from gateway.core import Gateway
from tandem.telemetry import get_log

_HOUSEKEEPING_INTERVAL = 30.0
_WORKER_ROWS_KEPT = 7 * 86_400.0


class Reaper:
    """Level-triggered: each round looks at what is, and a round that failed is logged and
    leaves its work to the next."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._task: asyncio.Task[None] | None = None
        self._log = get_log()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="reaper")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        interval = self._gateway.settings.reaper_interval
        next_housekeeping = 0.0
        while True:
            try:
                await self.expire_sessions()
                self.sweep_futures()
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
                    detail=sessions.expired_reason(),
                )
                for session in sessions.overdue()
            )
        )

    def sweep_futures(self) -> None:
        """Gives up results that were fetched, or that nobody wants."""
        gone = self._gateway.futures.sweep()
        self._gateway.oplog.forget(
            future.request_id
            for future in gone
            if future.source == "operation" and future.fetched_at is not None
        )

    async def keep_house(self) -> None:
        """Idle sampling sessions, unnamed versions, expired results and checkpoints."""
        gateway = self._gateway
        in_use = gateway.samplers.versions_in_use()
        touched = set(gateway.sampling.expire_idle(in_use=in_use))
        touched.update(run.id for run in gateway.runs.all() if run.facts.published)
        for run_id in sorted(touched):
            await gateway.collect(run_id)
        await gateway.versions.expire_checkpoints()
        gateway.oplog.expire()
        gateway.fleet.forget_rows_before(time.time() - _WORKER_ROWS_KEPT)
