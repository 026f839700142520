"""The `Gateway`: it builds all parts and does the work that concerns several of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

from gateway.checkpoints.base_models import BaseModels
from gateway.checkpoints.catalog import CheckpointCatalog
from gateway.checkpoints.collector import GarbageCollector
from gateway.checkpoints.copies import CheckpointCopier
from gateway.checkpoints.downloads import DownloadSigner
from gateway.checkpoints.pins import Pins
from gateway.checkpoints.versions import VersionStore
from gateway.jobs.life import JobLife
from gateway.jobs.registry import JobRegistry
from gateway.jobs.results import ResultImporter
from gateway.jobs.submission import JobSubmission
from gateway.metrics import Metrics
from gateway.owners.auth.audit import AuditLog
from gateway.owners.auth.bootstrap import take_bootstrap_key
from gateway.owners.auth.identity import Identity
from gateway.owners.auth.keys import KeyStore, check_listening
from gateway.owners.auth.oidc import OidcProvider
from gateway.owners.auth.page_sessions import PageSessions
from gateway.owners.budgets import OwnerBudgets
from gateway.owners.counted_lines import CountedLines
from gateway.owners.limits import Quotas
from gateway.owners.sessions.queries import SessionQueries
from gateway.owners.sessions.registry import SessionRegistry, why_ended
from gateway.owners.usage.meter import SampleMeter, UsageMeter
from gateway.owners.usage.reports import BillingReports
from gateway.owners.usage.time_shares import Timelines
from gateway.owners.usage.trace_exports import TraceExporter
from gateway.playground.trials import Playground
from gateway.recorder.store import TraceStore
from gateway.runs.admission import OperationAdmission
from gateway.runs.custom_losses import CustomLossStore
from gateway.runs.journal import Journal
from gateway.runs.lifecycle import RunLifecycle
from gateway.runs.record.rows import RunRecords
from gateway.runs.record.store import RecordStore
from gateway.runs.recovery.snapshots import SnapshotStore
from gateway.runs.registry import RunRegistry
from gateway.runs.stopping import Stop
from gateway.runs.tools import RunTools
from gateway.runs.trainer_hosts import TrainerHosts
from gateway.sampling.autoscaling import Autoscaler
from gateway.sampling.implicit_sessions import ImplicitSessions
from gateway.sampling.router import SamplerRouter
from gateway.sampling.sessions import SamplingSessionRegistry
from gateway.storage.data_directory import (
    keep_api_key,
    keep_signing_key,
    locked_data_directory,
    private_directory,
)
from gateway.storage.database import Database
from gateway.storage.fair_queue import FairSemaphore
from gateway.storage.futures.completion_feed import CompletionFeed
from gateway.storage.futures.table import RESULT_BYTES, RESULTS, FutureTable
from gateway.storage.leadership import Leadership
from gateway.storage.retention import Retention
from gateway.workers.declared_groups import budgets_of, groups_of
from gateway.workers.engine_adapter import EngineAdapter
from gateway.workers.epoch import Epoch
from gateway.workers.groups import WorkerGroup
from gateway.workers.job_adapter import JobAdapter
from gateway.workers.launchers.base import Launchers
from gateway.workers.processes import Processes
from gateway.workers.request_maker import RequestMaker
from gateway.workers.roster import Roster
from gateway.workers.run_options import check_defaults
from gateway.workers.spill import free_on_disk
from gateway.workers.supervisor import Supervisor
from gateway.workers.table import WorkerTable
from gateway.workers.trainer_adapter import TrainerAdapter
from gateway.workers.worker_metrics import WorkerMetrics
from gateway.workers.worker_use import WorkerUseMeter
from tandem.agent.host import Host
from tandem.errors import SessionFinished, StorageFailed
from tandem.protocol.worker import WORKER_STOP_TIMEOUT
from tandem.settings.gateway import GatewaySettings
from tandem.telemetry import get_log

_PATIENCE = WORKER_STOP_TIMEOUT + 30.0
"""Seconds to wait for workers to end. A slower one keeps its place until nothing is left."""


class Gateway:
    """All parts of a running gateway. `Gateway.open` creates one."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: GatewaySettings,
        *,
        launchers: Launchers,
        metrics: Metrics,
        epoch: Epoch,
        leadership: Leadership | None = None,
        stop: Stop | None = None,
    ) -> AsyncIterator[Gateway]:
        """Open the data directory and everything in it, and close it at the end of the block.

        Sessions and runs of an earlier gateway continue. Its other unfinished work fails or is
        removed. At the end, sessions and runs stay for the next gateway, and `stop` decides about
        the workers. A `leadership`, which has the same `epoch`, replaces the directory's lock.
        Raises `InvalidRequest` if another gateway uses the directory, or if other machines could
        reach this gateway without a key."""
        with locked_data_directory(settings.data_dir, shared=leadership is not None):
            gateway = cls(
                settings,
                launchers=launchers,
                metrics=metrics,
                epoch=epoch,
                leadership=leadership,
                stop=stop or Stop(hand_over=False),
            )
            try:
                await gateway._restore()
                yield gateway
            finally:
                try:
                    await gateway._close()
                finally:
                    await gateway.database.close()

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        launchers: Launchers,
        metrics: Metrics,
        epoch: Epoch,
        leadership: Leadership | None,
        stop: Stop,
    ) -> None:
        self.settings = settings
        self.stop = stop
        self.metrics = metrics
        self.started_at = time.time()
        data_dir = settings.data_dir
        private = private_directory(settings)
        self.api_key = settings.api_key or keep_api_key(private)
        self.signing_key = signing_key = keep_signing_key(private)
        self.database = database = Database(
            url=settings.database_url, data_dir=data_dir, leadership=leadership
        )
        self.keys = KeyStore(database=database)
        self.identity = Identity(keys=self.keys, signing_key=signing_key)
        self.page_sessions = PageSessions(
            database=database, keys=self.keys, local_key=self.api_key, started_at=self.started_at
        )
        self.oidc = OidcProvider(settings.oidc) if settings.oidc else None
        self.audit = AuditLog(database=database)
        self.refused_keys = CountedLines(
            metrics.refused_keys, first="key_refused", more="keys_refused"
        )
        self.limits = Quotas(settings=settings.limit, metrics=metrics)
        # The gateway decompresses one large request body at a time, and parses one at a time.
        self.decompression, self.parsing = FairSemaphore(slots=1), FairSemaphore(slots=1)
        self.sessions = SessionRegistry(
            database=database, limits=self.limits, ttl=settings.session_ttl
        )
        self.session_queries = SessionQueries(database=database, key=signing_key)
        self.run_records = RunRecords(database=database)
        self.budgets = OwnerBudgets(database=database, limits=self.limits)
        self.usage = UsageMeter(database=database, budgets=self.budgets)
        self.usage_reports = BillingReports(database=database, usage=self.usage)
        self.timelines = Timelines()
        self.samples = SampleMeter(usage=self.usage, timelines=self.timelines)
        self.recorder = TraceStore(folder=private / "traces", limits=self.limits)
        self.traces = TraceExporter(database=database, samples=self.samples, key=signing_key)
        self.futures = FutureTable(
            folder=private / "results" / "samples",
            result_ttl=settings.result_ttl,
            bytes_in_memory=RESULT_BYTES,
            max_samples=RESULTS,
            metrics=metrics,
        )
        self.completions = CompletionFeed(futures=self.futures, idle_ttl=settings.result_ttl)
        self.models = BaseModels(
            database=database,
            data_dir=data_dir,
            models_dir=(settings.models_dir or data_dir / "models").absolute(),
        )
        self.pins = Pins()
        self.checkpoints = CheckpointCatalog(database=database, pins=self.pins, limits=self.limits)
        self.record = RecordStore(
            database=database,
            data_dir=data_dir,
            checkpoints=self.checkpoints,
            metrics=metrics,
            epoch=epoch.number,
        )
        self.versions = VersionStore(
            database=database, data_dir=data_dir, min_free_bytes=settings.min_free_bytes
        )
        self.collector = GarbageCollector(
            database=database, data_dir=data_dir, private_dir=private, checkpoints=self.checkpoints
        )
        self.copies = CheckpointCopier(
            database=database,
            data_dir=data_dir,
            checkpoints=self.checkpoints,
            versions=self.versions,
        )
        self.downloads = DownloadSigner(
            key=signing_key, checkpoints=self.checkpoints, versions=self.versions
        )
        self.worker_use = WorkerUseMeter(database=database, metrics=metrics, clock=time.time)
        self.processes = Processes(
            settings=settings,
            launchers=launchers,
            metrics=metrics,
            epoch=epoch,
            use=self.worker_use,
        )
        self._worker_metrics = WorkerMetrics(metrics)
        trainers, engines = TrainerAdapter(self.processes), EngineAdapter(self.processes)
        job_workers = JobAdapter(self.processes)
        self.supervisor = Supervisor(
            Roster(
                table=WorkerTable(database),
                adapters={"trainer": trainers, "engine": engines, "job": job_workers},
                settings=settings.sharing,
                epoch=epoch.number,
                clock=time.time,
                metrics=self._worker_metrics,
                use=self.worker_use,
                note_state=self.timelines.workers.note,
            ),
            free_on_disk=partial(free_on_disk, settings),
        )
        requests = RequestMaker(
            settings=settings, groups=self.groups, prepare=launchers["trainer"].prepare
        )
        self.implicit_sessions = ImplicitSessions(
            sessions=self.sessions, display_name="Samples without a session"
        )
        self.samplers = SamplerRouter(
            settings=settings,
            supervisor=self.supervisor,
            adapter=engines,
            processes=self.processes,
            requests=requests,
            metrics=metrics,
            meter=self.samples,
            pins=self.pins,
            models=self.models,
            sessions=self.sessions,
            limits=self.limits,
        )
        self.autoscaler = Autoscaler(self.samplers)
        self.sampling = SamplingSessionRegistry(
            database=database,
            models=self.models,
            checkpoints=self.checkpoints,
            versions=self.versions,
            sessions=self.sessions,
            samplers=self.samplers,
            limits=self.limits,
            idle_ttl=settings.sampler_idle_ttl,
        )
        self.custom_losses = CustomLossStore(database=database, limits=self.limits)
        self.journal = Journal(
            database=database,
            data_dir=private,
            futures=self.futures,
            metrics=metrics,
            result_ttl=settings.result_ttl,
        )
        hosts = TrainerHosts(
            settings=settings,
            supervisor=self.supervisor,
            adapter=trainers,
            requests=requests,
            samplers=self.samplers,
        )
        tools = RunTools(
            settings=settings,
            journal=self.journal,
            records=self.run_records,
            record=self.record,
            checkpoints=self.checkpoints,
            versions=self.versions,
            snapshots=SnapshotStore(
                database=database,
                data_dir=data_dir,
                checkpoints=self.checkpoints,
                versions=self.versions,
            ),
            samplers=self.samplers,
            sampling=self.sampling,
            usage=self.usage,
            timelines=self.timelines,
            metrics=metrics,
            custom_losses=self.custom_losses,
        )
        self.runs = RunRegistry(
            sessions=self.sessions,
            limits=self.limits,
            groups=self.groups,
            hosts=hosts,
            lifecycle=RunLifecycle(hosts=hosts, collector=self.collector, tools=tools),
            tools=tools,
        )
        self.jobs = JobRegistry(
            life=JobLife(
                settings=settings,
                database=database,
                supervisor=self.supervisor,
                launcher=launchers["job"],
                adapter=job_workers,
                requests=requests,
                record=self.record,
                records=self.run_records,
                usage=self.usage,
                results=ResultImporter(
                    database=database,
                    data_dir=data_dir,
                    checkpoints=self.checkpoints,
                    versions=self.versions,
                    record=self.record,
                ),
            ),
            runs=self.runs,
            sessions=self.sessions,
            limits=self.limits,
            end_session_soon=self.end_session_soon,
        )
        self.job_submission = JobSubmission(
            registry=self.jobs, models=self.models, versions=self.versions, groups=self.groups
        )
        self.playground = Playground(
            settings=settings.playground,
            database=database,
            keys=self.keys,
            limits=self.limits,
            models=self.models,
            checkpoints=self.checkpoints,
            sessions=self.sessions,
            end_session_soon=self.end_session_soon,
        )
        self.runs.others_of = self.jobs.count_of
        self.budgets.on_exhausted = self.end_due
        self.admission = OperationAdmission(
            runs=self.runs, journal=self.journal, database=database, limits=self.limits
        )
        self.retention = Retention(
            database=database,
            data_dir=data_dir,
            history_ttl=max(settings.history_ttl, settings.result_ttl),
        )
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._log = get_log()
        self._register_gauges()

    async def _restore(self) -> None:
        launchers = self.processes.launchers
        # Meanwhile, because an agent's first description takes a tenth of a second.
        describing = asyncio.create_task(launchers["trainer"].describe_host())
        try:
            await self._read_installation()
            await self._take_up_work(await describing)
        finally:
            describing.cancel()
            await asyncio.gather(describing, return_exceptions=True)

    async def _read_installation(self) -> None:
        await self.database.open()
        await self.keys.open()
        await self.page_sessions.read_page_sessions()
        self.keys.set_local(self.api_key)
        await take_bootstrap_key(self.settings, keys=self.keys, audit=self.audit)
        check_listening(self.settings, keys=self.keys)
        await self.futures.clear_folder()
        await self.recorder.find_traces()
        await self.models.read_models()
        for name, path in self.settings.models.items():  # before sessions, which may use them
            await self.models.add(name=name, path=str(path))

    async def _take_up_work(self, host: Host) -> None:
        launchers = self.processes.launchers
        # Wrong settings end the start here, before workers of an earlier gateway are taken up.
        names: dict[str, str] = {role: launcher.name for role, launcher in launchers.items()}
        groups = groups_of(self.settings, host, names)
        check_defaults(self.settings, groups)
        for group in groups:
            self._log.info("device_group", **group.about())
        self.supervisor.declare(groups, budgets_of(self.settings, host))
        self._worker_metrics.watch([group.name for group in groups], self.supervisor.overview)
        await self.processes.find_processes(self.supervisor)
        await self.supervisor.open()
        await self.sessions.read_sessions()
        await self.budgets.open()
        await self.runs.resume_runs()
        await self.jobs.resume_jobs()
        await self.playground.read_trials()
        await self.sampling.restore_sessions()
        sampled = [s for s in self.sampling.all() if not s.all_weights]
        await self.samplers.take_up_engines([(s.session_id, s.base_model, s.rank) for s in sampled])
        hosts = self.runs.hosts.list_hosts()
        runs = {run_id for host in hosts for run_id in host.runs}
        samplers = self.samplers.keys() | {host.sampler for host in hosts}  # a host may hold more
        jobs = {job.run_id for job in self.jobs.all()}
        await self.supervisor.settle(runs | samplers | jobs)
        await self.collector.collect_all()

    def groups(self) -> tuple[WorkerGroup, ...]:
        """Return the declared groups."""
        return tuple(group for group in self.supervisor.roster.groups.values() if group.kinds)

    async def _close(self) -> None:
        self.futures.release_waiters()
        if ending := tuple(self._ending.values()):
            _, late = await asyncio.wait(ending, timeout=_PATIENCE)
            for task in late:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
        if not self.stop.hand_over:
            await self.runs.lifecycle.save(self.stop, timeout=self.settings.stop_timeout)
        self.supervisor.only_end()  # a cancelled run's devices stay unused
        await self.jobs.close(patience=_PATIENCE)
        await self.runs.lifecycle.close(self.runs.all(), patience=_PATIENCE)
        self.write_usage()  # the gateway may be killed during the rest
        await self.record.close()
        await self.samplers.close()
        await self.supervisor.close()
        await self.processes.close(leaving=self.stop.hand_over)
        await self.copies.close()
        await self.collector.close()
        await self.futures.close()
        self.keys.write_uses()
        self.refused_keys.write(closing=True)

    async def end_session(self, *, session_id: str, state: str, reason: str, detail: str) -> None:
        """End a session. Return when its workers have stopped and its unnamed files are removed.
        If workers do not stop in time, return and continue in the background.

        Repeated calls wait for the same end, and only the first reason counts."""
        self.end_session_soon(session_id, state=state, reason=reason, detail=detail)
        if (task := self._ending.get(session_id)) is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(task), _PATIENCE)

    def end_session_soon(self, session_id: str, *, state: str, reason: str, detail: str) -> None:
        """Begin the end of a session, unless it has begun, and do not wait for it."""

        def ended(task: asyncio.Task[None]) -> None:
            self._ending.pop(session_id, None)
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, StorageFailed):
                self._log.error("session_end_failed", session_id=session_id, exc_info=error)

        if session_id not in self._ending and self.sessions.get(session_id) is not None:
            end = self._end_session(session_id, state=state, reason=reason, detail=detail)
            task = self._ending[session_id] = asyncio.create_task(end, name=f"end-{session_id}")
            task.add_done_callback(ended)

    def end_due(self) -> None:
        """Begin the ends of runs and jobs with a passed deadline or a used-up budget."""
        self.runs.end_due()
        self.jobs.end_due()

    def write_usage(self) -> None:
        """Write the sums of usage so far, without waiting."""
        self.usage.write()
        self.worker_use.write(self.supervisor.roster.rows.values())

    async def collect(self, run_id: str) -> bool:
        """Remove the run's unused, unnamed files. Return False if unnamed files are still in
        use."""
        return await self.collector.collect(run_id, ended=self.runs.get(run_id) is None)

    async def _end_session(self, session_id: str, *, state: str, reason: str, detail: str) -> None:
        await self.runs.finish_ends(session_id)  # a restart would drop their checkpoints
        try:
            await self.sessions.end(
                session_id=session_id, state=state, reason=reason, detail=detail
            )
        finally:  # the session's workers stop even if the write fails
            self._log.info(
                "session_ended", session_id=session_id, state=state, reason=reason, detail=detail
            )
            error = SessionFinished(why_ended(session_id, reason=reason, detail=detail))
            run_ids, job_ids, _ = await asyncio.gather(
                self.runs.end_session(session_id, error),
                self.jobs.end_session(session_id, error),
                self.samplers.end_session(session_id, error),
            )
            ended = sorted({*run_ids, *job_ids, *self.sampling.end_session(session_id)})
            for run_id in ended:  # after a failure, housekeeping collects again
                self.checkpoints.mark(run_id)
            self.custom_losses.end_session(session_id)
            for run_id in ended:
                await self.collect(run_id)

    def _register_gauges(self) -> None:
        watch = self.metrics.watch
        watch("sessions", "Active sessions.", lambda: len(self.sessions.all()))
        for state in ("waiting", "running"):
            watch(
                f"trials_{state}",
                f"Trials of the playground in the state {state}.",
                partial(self.playground.count_in, state),
            )
        watch(
            "unknown_folders",
            "Folders of the data directory that the database does not know.",
            lambda: len(self.collector.unknown),
        )
        watch(
            "host_memory_bytes",
            "Host memory that workers have, or may take in a sleep.",
            lambda: self.supervisor.overview().host_bytes_in_use,
        )
        watch(
            "host_memory_budget_bytes",
            "Host memory that they may have; 0: not bounded.",
            lambda: self.supervisor.roster.budgets.host_bytes,
        )
        watch(
            "waiting_samples",
            "Samples that have not ended.",
            lambda: sum(sampler.waiting for sampler in self.samplers.all()),
        )
