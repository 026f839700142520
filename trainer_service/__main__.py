"""`python -m trainer_service`: rank 0 of a trainer. On several nodes, the others run `node.py`.

torch and transformers are imported in the engine thread, after the address is reported, or before
ranks are forked."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from prometheus_client import CollectorRegistry

from tandem.errors import TandemError, WorkerStartFailed, describe
from tandem.protocol.devices import confine, devices_of_ranks
from tandem.protocol.fencing import Fence
from tandem.protocol.worker import WorkerReport, WorkerSpec
from tandem.protocol.worker_link import LauncherLink, launcher_link
from tandem.protocol.worker_server import WorkerServer
from tandem.settings.workers import TrainerSettings
from tandem.telemetry import configure_logging, get_log
from tandem.v1 import trainer_pb2_grpc
from trainer_service.compute.topology import Topology, topology_of
from trainer_service.service.engine_thread import EngineThread
from trainer_service.service.libraries import import_libraries, set_environment
from trainer_service.service.metrics import TrainerMetrics
from trainer_service.service.nodes import PeerRanks
from trainer_service.service.servicer import TrainerServicer, first_of

if TYPE_CHECKING:
    from trainer_service.service.hosted_runs import HostedRuns


def main() -> None:
    link = launcher_link()
    set_environment()
    link.preload(import_libraries)
    serve(link.read_spec(), link)


def serve(spec: WorkerSpec, link: LauncherLink) -> NoReturn:
    link.hold_lifeline()
    faulthandler.enable()  # a crash in native code leaves its stacks in the log
    configure_logging(service="trainer", level=spec.log_level)
    worker = _Worker(spec, link)
    try:
        topology, ranks = worker.start_ranks()
    except Exception as error:  # noqa: BLE001 - every error is reported to the launcher
        code = worker.fail_to_start(error)
    else:
        code = asyncio.run(worker.run(topology, ranks))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not a normal exit: the engine thread may wait forever in a collective.
    os._exit(code)


class _Worker:
    def __init__(self, spec: WorkerSpec, link: LauncherLink) -> None:
        self._spec = spec
        self._link = link
        self._settings = spec.trainer or TrainerSettings()
        self._failure = ""
        self._broken = Future[TandemError]()
        self._log = get_log(worker_id=spec.worker_id, session_id=spec.session_id)

    def start_ranks(self) -> tuple[Topology, PeerRanks]:
        """Raises `WorkerStartFailed`."""
        topology = topology_of(self._spec, node=0)
        devices = devices_of_ranks(self._spec.devices, ranks=self._settings.ranks)
        ranks = PeerRanks(self._spec, topology, devices=devices, on_death=self._break)
        if devices:
            confine(devices[0])
        return topology, ranks

    def _break(self, error: TandemError) -> None:
        """End the worker, from any thread. The first error is reported."""
        with suppress(InvalidStateError):
            self._broken.set_result(error)

    async def run(self, topology: Topology, ranks: PeerRanks) -> int:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        broken = asyncio.wrap_future(self._broken)
        registry = CollectorRegistry()
        engine = EngineThread(
            start=lambda: self._bring_up(topology, ranks),
            heartbeat=self._settings.collective_timeout / 3,
            on_broken=lambda error: self._break(ranks.cause(error)),
        )
        server = WorkerServer(self._spec)
        servicer = TrainerServicer(
            engine=engine,
            run_id=self._spec.first_run or self._spec.run_id,
            operation_timeout=self._settings.operation_timeout,
            metrics=TrainerMetrics(registry),
            log=self._log,
            broken=broken,
            fence=Fence(self._spec.lease),
        )
        trainer_pb2_grpc.add_TrainerServicer_to_server(servicer, server.grpc)
        self._report(await server.listen(registry))
        engine.run()
        code = await self._live(engine, server, ranks, stop=stop, broken=broken)
        # Give a recent abort time to reach its caller.
        await server.stop_serving(0.5 if code else 0.0)
        ranks.end_worker(self._failure)
        return code

    async def _live(
        self,
        engine: EngineThread,
        server: WorkerServer,
        ranks: PeerRanks,
        *,
        stop: asyncio.Event,
        broken: asyncio.Future[TandemError],
    ) -> int:
        stopping = asyncio.create_task(stop.wait())
        started = asyncio.wrap_future(engine.started)
        await first_of(stopping, started, broken)
        if stopping.done():
            return 0
        if broken.done():
            return self.fail(WorkerStartFailed(broken.result().message))
        error = started.exception()
        if error is not None and not isinstance(error, TandemError):
            self._log.error("start_failed", exc_info=error)
            cause = await asyncio.to_thread(ranks.cause, error)
            return self.fail(WorkerStartFailed(cause.message))
        if error is not None:
            return self.fail_to_start(error)
        await server.set_serving(True)
        self._log.info("ready", ranks=self._settings.ranks)
        await first_of(stopping, broken)
        await server.set_serving(False)
        if broken.done():
            return self.fail(broken.result())
        return 0

    def fail_to_start(self, error: BaseException) -> int:
        self._log.error("start_failed", exc_info=error)
        if isinstance(error, TandemError):
            return self.fail(error)
        return self.fail(WorkerStartFailed(describe(error, typed=True)))

    def fail(self, error: TandemError) -> int:
        self._failure = error.message
        self._log.error("worker_failed", error_type=error.type, error=error.message)
        self._report(WorkerReport.of_error(error))
        return 1

    def _report(self, report: WorkerReport) -> None:
        try:
            self._link.report(report)
        except BrokenPipeError:
            self._log.warning("report_unread", error=report.error)

    def _bring_up(self, topology: Topology, ranks: PeerRanks) -> HostedRuns:
        began = time.monotonic()
        import_libraries()
        imported = time.monotonic()
        from trainer_service.compute.process_group import bring_up
        from trainer_service.service.hosted_runs import HostedRuns

        first = bring_up(self._spec, settings=self._settings, topology=topology, others=ranks)
        self._log.info(
            "model_loaded",
            import_seconds=round(imported - began, 2),
            model_seconds=round(time.monotonic() - imported, 2),
        )
        return HostedRuns(first, run_id=self._spec.first_run or self._spec.run_id)


if __name__ == "__main__":
    main()
