"""Periodic work: expiry of sessions, results, checkpoints and idle samplers, removal of old
history and traces, search for new base models, and a measurement of the event loop."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from gateway.core import Gateway
from gateway.storage.log_files import tidy_logs
from tandem.errors import StorageFailed, describe
from tandem.telemetry import get_log

ROUND_INTERVAL = 2.0
_HOUSEKEEPING_INTERVAL = 30.0
_LAG_INTERVAL = 0.25
_RETENTION_INTERVAL = 600.0
_MODELS_INTERVAL = 10.0
_DISK_INTERVAL = 10.0

LOG_MAX_BYTES = 64 * 2**20
"""Larger logs are rotated into LOG.1, LOG.2 and LOG.3."""
_LOG_COPIES = 3
LOG_TTL = 30 * 86_400.0
"""Seconds. Older rotated logs, and logs of ended workers, are removed."""


class Housekeeping:
    """Level-triggered: each round looks at the current state. A failed round is logged, and the
    next one repeats its work. A storage outage is logged at its start and end only."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._in_use: set[str] = set()
        self._next_housekeeping = 0.0
        self._log = get_log()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run a round every `ROUND_INTERVAL` seconds during the block. Slow work has tasks of its
        own."""
        gateway = self._gateway
        rounds = self._repeat_later(self._do_round, interval=ROUND_INTERVAL)
        removals = self._repeat_later(gateway.retention.remove_old, interval=_RETENTION_INTERVAL)
        models = self._repeat(gateway.models.discover_models, interval=_MODELS_INTERVAL)
        disk = self._repeat(self._measure_disk, interval=_DISK_INTERVAL)
        trials = self._repeat_later(gateway.playground.look_at_trials, interval=ROUND_INTERVAL)
        scaling = self._repeat_later(gateway.autoscaler.follow_demand, interval=ROUND_INTERVAL)
        tasks = [
            asyncio.create_task(disk, name="free-disk"),
            asyncio.create_task(rounds, name="housekeeping"),
            asyncio.create_task(removals, name="retention"),
            asyncio.create_task(models, name="models-directory"),
            asyncio.create_task(self._measure_lag(), name="event-loop-lag"),
            asyncio.create_task(scaling, name="autoscaling"),
            asyncio.create_task(trials, name="playground"),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_INTERVAL
            await asyncio.sleep(_LAG_INTERVAL)
            self._gateway.sessions.note_running()
            self._gateway.metrics.event_loop_lag.observe(max(0.0, loop.time() - due))

    async def _measure_disk(self) -> None:
        folder = self._gateway.settings.data_dir
        usage = await asyncio.to_thread(shutil.disk_usage, folder)  # a lost server blocks it
        self._gateway.metrics.free_disk.set(usage.free)

    async def _repeat_later(self, work: Callable[[], Awaitable[None]], *, interval: float) -> None:
        """Begin after the first answers to clients, which would wait for the database meanwhile."""
        await asyncio.sleep(ROUND_INTERVAL)
        await self._repeat(work, interval=interval)

    async def _repeat(self, work: Callable[[], Awaitable[None]], *, interval: float) -> None:
        failing = False
        while True:
            try:
                await work()
            except StorageFailed as error:
                if not failing:
                    self._log.error("housekeeping_waits_for_storage", reason=error.message)
                failing = True
            except Exception:  # noqa: BLE001 - the next round must come all the same
                self._log.exception("housekeeping_failed")
            else:
                if failing:
                    self._log.warning("housekeeping_goes_on")
                failing = False
            await asyncio.sleep(interval)

    async def _do_round(self) -> None:
        """Begin the ends of runs at their deadlines and of silent sessions, drop fetched and old
        results, expire checkpoints, end idle sampling sessions, and remove unused files of names
        lost since the last round."""
        gateway = self._gateway
        gateway.end_due()
        for session_id, detail in gateway.sessions.overdue().items():
            gateway.end_session_soon(session_id, state="expired", reason="expired", detail=detail)
        gone = gateway.futures.sweep()
        gateway.completions.sweep()
        gateway.journal.forget(
            future.request_id
            for future in gone
            if future.source == "operation" and future.fetched_at is not None
        )
        gateway.write_usage()
        gateway.keys.write_uses()
        gateway.refused_keys.write()
        await gateway.checkpoints.expire()
        await self._collect([*gateway.checkpoints.take_marked(), *gateway.sampling.expire_idle()])
        if time.monotonic() >= self._next_housekeeping:
            self._next_housekeeping = time.monotonic() + _HOUSEKEEPING_INTERVAL
            await self.keep_house()

    async def keep_house(self) -> None:
        """Do less frequent work: logs, unused weight versions, files that were in use before, and
        expired results."""
        gateway = self._gateway
        await self._tidy_logs()
        touched = set(self._in_use)
        touched.update(run.id for run in gateway.runs.all() if run.parent)
        await self._collect(sorted(touched))
        gateway.collector.empty_trash_soon()
        await gateway.journal.expire()
        await gateway.recorder.expire_traces()
        await gateway.jobs.remove_old_files()

    async def _tidy_logs(self) -> None:
        try:
            await asyncio.to_thread(
                tidy_logs,
                self._gateway.settings.data_dir / "logs",
                max_bytes=LOG_MAX_BYTES,
                copies=_LOG_COPIES,
                ttl=LOG_TTL,
                in_use={
                    "gateway",
                    "agent",
                    *(worker.worker_id for worker in self._gateway.processes.list_records()),
                },
            )
        except OSError as error:  # such as a full disk: the other work continues
            self._log.error("logs_not_tidied", reason=describe(error))

    async def _collect(self, run_ids: list[str]) -> None:
        self._in_use.update(run_ids)  # after a failure, the next `keep_house` repeats it
        for run_id in run_ids:
            if await self._gateway.collect(run_id):
                self._in_use.discard(run_id)
