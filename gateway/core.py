"""The gateway as a whole: its parts, put together, and what concerns all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from gateway.api.access import Access
from gateway.auth.audit import AuditLog
from gateway.auth.identity import Identity
from gateway.auth.keys import KeyStore
from gateway.auth.listening import check_listening
from gateway.auth.signing import keep_signing_key
from gateway.checkpoints.base_models import BaseModels
from gateway.checkpoints.copies import CheckpointCopier
from gateway.checkpoints.downloads import DownloadSigner
from gateway.checkpoints.versions import VersionStore
from gateway.futures.completion_feed import CompletionFeed
from gateway.futures.result_store import ResultStore
from gateway.futures.table import FutureTable, Outcome
from gateway.gauges import watch_parts
from gateway.limits.quotas import Counts, Quotas
from gateway.metrics import Metrics
from gateway.runs.admission import Admission
from gateway.runs.journal import Journal
from gateway.runs.operations import LossDefinitions
from gateway.runs.queries import Queries
from gateway.runs.registry import RunRegistry
from gateway.sampling.implicit_sessions import ImplicitSessions
from gateway.sampling.router import SamplerRouter
from gateway.sampling.sessions import SamplingSessionRegistry
from gateway.sessions.registry import SessionRegistry, why_ended
from gateway.sessions.search import SessionSearch
from gateway.storage.data_directory import DataDirectoryLock, keep_api_key
from gateway.storage.database import Database
from gateway.usage.meter import UsageMeter
from gateway.usage.reports import BillingReports
from gateway.usage.sample_log import SampleLog
from gateway.usage.trace_exports import TraceExporter
from gateway.workers.fleet import ChannelFactory, Fleet, open_channel
from gateway.workers.launchers.base import Launcher
from tandem.errors import SessionFinished
from tandem.settings import GatewaySettings
from tandem.telemetry import get_log


class Gateway:
    """Owns every part. `await open()` before use; `await close()` stops all workers."""

    def __init__(
        self,
        *,
        settings: GatewaySettings,
        launcher: Launcher,
        channel_factory: ChannelFactory = open_channel,
    ) -> None:
        self.settings = settings
        self.launcher = launcher
        self.started_at = time.time()
        self.api_key = settings.api_key
        self.signing_key = b""
        self.metrics = Metrics()
        self.database = Database.at(url=settings.database_url, data_dir=settings.data_dir)
        self.models = BaseModels(database=self.database)
        self.sessions = SessionRegistry(
            database=self.database,
            ttl=settings.session_ttl,
            check_room=lambda owner: self.limits.check("sessions", owner=owner),
        )
        self.keys = KeyStore(database=self.database)
        self.identity = Identity(
            keys=self.keys,
            signing_key=lambda: self.signing_key,
            token_ttl=settings.token_ttl,
        )
        self.directory = Queries(database=self.database)
        self.search = SessionSearch(database=self.database, key=lambda: self.signing_key)
        self.audit = AuditLog(database=self.database)
        self.usage = UsageMeter(database=self.database, sessions=self.sessions)
        self.usage_reports = BillingReports(database=self.database, usage=self.usage)
        self.samples = SampleLog(usage=self.usage)
        self.traces = TraceExporter(
            database=self.database,
            samples=self.samples,
            data_dir=settings.data_dir,
            key=lambda: self.signing_key,
            ttl=settings.trace_ttl,
        )
        self.limits = Quotas(settings=settings.limit, metrics=self.metrics, counts=self._counts())
        self.results = ResultStore(
            folder=settings.data_dir / "results" / "samples",
            bytes_in_memory=settings.limit.result_bytes,
            most_samples=settings.limit.results,
            metrics=self.metrics,
        )
        self.futures = FutureTable(result_ttl=settings.result_ttl, keeper=self.results)
        self.completions = CompletionFeed(futures=self.futures, idle_ttl=settings.result_ttl)
        self.oplog = Journal(
            database=self.database, data_dir=settings.data_dir, result_ttl=settings.result_ttl
        )
        self.versions = VersionStore(
            database=self.database,
            data_dir=settings.data_dir,
            min_free_bytes=settings.min_free_bytes,
            limits=self.limits,
            in_use=lambda: self.runs.all_versions_in_use() | self.samplers.versions_in_use(),
        )
        self.sampling = SamplingSessionRegistry(
            database=self.database,
            models=self.models,
            versions=self.versions,
            sessions=self.sessions,
            limits=self.limits,
            idle_ttl=settings.sampler_idle_ttl,
        )
        self.access = Access(
            identity=self.identity,
            metrics=self.metrics,
            sessions=self.sessions,
            sampling=self.sampling,
            directory=self.directory,
            checkpoints=self.versions.checkpoints,
        )
        self.implicit_sessions = ImplicitSessions(
            sessions=self.sessions,
            sampling=self.sampling,
            display_name="Samples without a session",
        )
        self.fleet = Fleet(
            settings=settings,
            database=self.database,
            launcher=launcher,
            metrics=self.metrics,
            channel_factory=channel_factory,
        )
        self.samplers = SamplerRouter(
            settings=settings,
            fleet=self.fleet,
            metrics=self.metrics,
            samples=self.samples,
            sessions=self.sessions,
            limits=self.limits,
        )
        self.loss_definitions: dict[str, LossDefinitions] = {}
        self.runs = RunRegistry(
            settings=settings,
            database=self.database,
            log=self.oplog,
            futures=self.futures,
            fleet=self.fleet,
            samplers=self.samplers,
            sampling=self.sampling,
            sessions=self.sessions,
            versions=self.versions,
            loss_definitions=self.loss_definitions,
            metrics=self.metrics,
            usage=self.usage,
            limits=self.limits,
        )
        self.admission = Admission(
            database=self.database,
            log=self.oplog,
            futures=self.futures,
            runs=self.runs,
            limits=self.limits,
            max_queued=settings.max_queued_operations,
        )
        self.copies = CheckpointCopier(
            database=self.database, data_dir=settings.data_dir, versions=self.versions
        )
        self.downloads = DownloadSigner(key=lambda: self.signing_key, versions=self.versions)
        self._lock = DataDirectoryLock(settings.data_dir)
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._log = get_log()
        watch_parts(
            self.metrics,
            sessions=self.sessions,
            runs=self.runs,
            fleet=self.fleet,
            samplers=self.samplers,
            futures=self.futures,
            limits=self.limits,
            results=self.results,
        )

    async def open(self) -> None:
        """Takes the data directory, and clears up what an earlier gateway left in it.

        Raises `InvalidRequest` when another gateway uses it.
        """
        self._lock.take()
        try:
            if not self.api_key:
                self.api_key = keep_api_key(self.settings.data_dir)
            self.signing_key = keep_signing_key(self.settings.data_dir)
            await self.database.open()
            await self.results.open()
            await self.keys.open()
            self.keys.set_local(self.api_key)
            check_listening(self.settings, keys=self.keys)
            await self.models.open()
            await self.fleet.open()
            lost = await self.oplog.abandon()
            lost_runs = await self.runs.open()
            await self.sessions.open()
            await self.sampling.open()
            await self.versions.sweep_all()
            if lost or lost_runs:
                self._log.warning("restarted", operations_failed=lost, runs_ended=lost_runs)
        except BaseException:
            await self.database.close()
            self._lock.release()
            raise

    async def close(self) -> None:
        """Stops everything that runs. Sessions stay: clients come back to the next gateway."""
        self.futures.release_waiters()
        await asyncio.gather(*self._ending.values(), return_exceptions=True)
        await self.runs.close()
        await self.samplers.close()
        await self.fleet.close()
        await self.copies.close()
        await self.traces.close()
        await self.results.close()
        self.usage.write()
        self.keys.write_uses()
        await self.database.close()
        self._lock.release()

    async def end_session(self, *, session_id: str, state: str, reason: str, detail: str) -> None:
        """Ends a session; returns when its workers are stopped and its unnamed files are gone.

        Asked twice, both wait for the one end, and the first reason counts.
        """
        task = self._ending.get(session_id)
        if task is None:
            if self.sessions.get(session_id) is None:
                return
            task = self._ending[session_id] = asyncio.create_task(
                self._end_session(session_id, state=state, reason=reason, detail=detail)
            )
        await asyncio.shield(task)

    async def recall(self, request_id: str) -> Outcome | None:
        """Return the outcome of a request that memory no longer holds, None if there is none."""
        outcome = await self.oplog.recall(request_id)
        for definitions in self.loss_definitions.values():
            outcome = outcome or await definitions.recall(request_id)
        return outcome

    async def collect(self, run_id: str) -> bool:
        """Removes the run's files that nothing names or uses. False: some are still in use."""
        if self.runs.get(run_id) is None:
            return await self.versions.sweep_run(run_id)
        return await self.versions.collect(run_id)

    async def _end_session(self, session_id: str, *, state: str, reason: str, detail: str) -> None:
        try:
            try:
                await self.sessions.end(
                    session_id=session_id, state=state, reason=reason, detail=detail
                )
            finally:  # should the database refuse, its workers stop all the same
                self._log.info(
                    "session_ended",
                    session_id=session_id,
                    state=state,
                    reason=reason,
                    detail=detail,
                )
                await self._clear(session_id, why_ended(session_id, reason=reason, detail=detail))
        finally:
            self._ending.pop(session_id, None)

    async def _clear(self, session_id: str, why: str) -> None:
        error = SessionFinished(why)
        run_ids, _ = await asyncio.gather(
            self.runs.end_session(session_id, error),
            self.samplers.end_session(session_id, error),
        )
        named = self.sampling.end_session(session_id)
        for definitions in self.loss_definitions.values():
            await definitions.end_session(session_id)
        for run_id in sorted({*run_ids, *named}):
            await self.collect(run_id)

    def _counts(self) -> Counts:
        def owned(session_ids: Iterable[str], owner: str) -> int:
            sessions = map(self.sessions.get, session_ids)
            return sum(session is not None and session.owner == owner for session in sessions)

        return Counts(
            owner_of=lambda session_id: self.sessions.owner_of(session_id),
            active={
                "sessions": lambda owner: sum(s.owner == owner for s in self.sessions.all()),
                "runs": lambda owner: owned(
                    (run.session_id for run in self.runs.all() if run.state != "ended"), owner
                ),
                "samplers": lambda owner: owned(
                    (sampler.session_id for sampler in self.samplers.all()), owner
                ),
                "sampling_sessions": lambda owner: owned(
                    (session.session_id for session in self.sampling.all()), owner
                ),
            },
            checkpoint_bytes=lambda owner: self.versions.checkpoints.bytes_of_owner(owner),
        )
