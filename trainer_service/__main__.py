"""`python -m trainer_service --report-fd N`: rank 0 of a trainer, as a launcher starts it.

Imports of torch and transformers happen late, in the engine thread, so that the address is
reported at once.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import os
import signal
import sys
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from tandem.errors import TandemError, WorkerDied, WorkerStartFailed
from tandem.settings import TrainerSettings
from tandem.telemetry import configure_logging, get_log, serve_metrics
from tandem.v1 import trainer_pb2_grpc
from tandem.worker import (
    GRPC_OPTIONS,
    WorkerReport,
    WorkerSpec,
    hold_lifeline,
    read_spec,
    send_report,
)
from tandem.worker_access import SecretInterceptor
from trainer_service.service.rank_processes import RankProcesses
from trainer_service.service.servicer import EngineThread, TrainerMetrics, TrainerServicer, first_of

if TYPE_CHECKING:
    from trainer_service.service.operations import Operations

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer_service")
    parser.add_argument("--report-fd", type=int, required=True)
    report_fd: int = parser.parse_args().report_fd
    spec = read_spec()
    hold_lifeline()
    faulthandler.enable()  # a crash in native code leaves its stacks in the log
    configure_logging(service="trainer", level=spec.log_level)
    # OpenMP threads that wait must sleep: spinning ones take the cores from the gateway, the
    # sampler and each other. Read when torch is first imported, by the other ranks, too.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    code = asyncio.run(_Worker(spec, report_fd).run())
    sys.stdout.flush()
    sys.stderr.flush()
    # Not a normal exit: the engine thread may sit in a collective that will never end.
    os._exit(code)


class _Worker:
    def __init__(self, spec: WorkerSpec, report_fd: int) -> None:
        self._spec = spec
        self._report_fd = report_fd
        self._settings = spec.trainer or TrainerSettings()
        self._log = get_log(worker_id=spec.worker_id, session_id=spec.session_id)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        broken: asyncio.Future[str] = loop.create_future()

        def break_with(sentence: str) -> None:
            def settle() -> None:
                if not broken.done():
                    broken.set_result(sentence)

            loop.call_soon_threadsafe(settle)

        ranks = RankProcesses(size=self._settings.ranks, on_death=break_with)
        registry = CollectorRegistry()
        engine = EngineThread(
            start=lambda: self._bring_up(ranks),
            heartbeat=self._settings.collective_timeout / 3,
            on_broken=lambda error: break_with(_sentence(error, ranks)),
        )
        server = grpc.aio.server(
            options=GRPC_OPTIONS, interceptors=[SecretInterceptor(self._spec.secret)]
        )
        health_servicer = health.aio.HealthServicer()
        await health_servicer.set("", _NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        servicer = TrainerServicer(
            engine=engine,
            operation_timeout=self._settings.operation_timeout,
            metrics=TrainerMetrics(registry),
            log=self._log,
            broken=broken,
        )
        trainer_pb2_grpc.add_TrainerServicer_to_server(servicer, server)
        port = server.add_insecure_port(f"{self._spec.host}:0")
        await server.start()
        self._report(
            WorkerReport(
                address=f"{self._spec.host}:{port}",
                metrics_port=serve_metrics(registry, host=self._spec.host),
                pid=os.getpid(),
            )
        )
        engine.run()
        code = await self._live(engine, health_servicer, stop=stop, broken=broken)
        # What was aborted a moment ago still has to reach its caller.
        await server.stop(0.5 if code else 0.0)
        ranks.kill()
        return code

    async def _live(
        self,
        engine: EngineThread,
        health_servicer: health.aio.HealthServicer,
        *,
        stop: asyncio.Event,
        broken: asyncio.Future[str],
    ) -> int:
        stopping = asyncio.create_task(stop.wait())
        started = asyncio.wrap_future(engine.started)
        await first_of(stopping, started, broken)
        if stopping.done():
            return 0
        if broken.done():
            return self._fail(WorkerStartFailed(broken.result()))
        error = started.exception()
        if error is not None:
            self._log.error("start_failed", exc_info=error)
            if isinstance(error, TandemError):
                return self._fail(error)
            return self._fail(WorkerStartFailed(f"{type(error).__name__}: {error}"))
        await health_servicer.set("", _SERVING)
        self._log.info("ready", ranks=self._settings.ranks)
        await first_of(stopping, broken)
        await health_servicer.set("", _NOT_SERVING)
        if broken.done():
            return self._fail(WorkerDied(broken.result()))
        return 0

    def _fail(self, error: TandemError) -> int:
        self._log.error("worker_failed", error_type=error.type, error=error.message)
        self._report(WorkerReport(error_type=error.type, error=error.message, pid=os.getpid()))
        return 1

    def _report(self, report: WorkerReport) -> None:
        try:
            send_report(self._report_fd, report)
        except BrokenPipeError:
            self._log.warning("report_unread", error=report.error)

    def _bring_up(self, ranks: RankProcesses) -> Operations:
        from trainer_service.compute.process_group import bring_up
        from trainer_service.service.operations import Operations

        return Operations(bring_up(self._spec, settings=self._settings, assign=ranks.assign))


def _sentence(error: BaseException, ranks: RankProcesses) -> str:
    """A collective fails when another rank died; then that is what there is to say."""
    return ranks.cause_of_death(timeout=1.0) or f"rank 0 failed: {type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
