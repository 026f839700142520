"""The life of the sampler's process: bind, report, make the engine, serve, stop.

The port is bound and reported before vLLM is imported. The engine is made in the thread that
will step it; gRPC health says NOT_SERVING until it is ready.
"""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from sampler_service.adapters import Adapters
from sampler_service.form_compiler import FormCompiler
from sampler_service.metrics import SamplerMetrics
from sampler_service.reload import Loader, Version, default_tolerance
from sampler_service.scheduler import Scheduler
from sampler_service.servicer import SamplerServicer, Serving
from tandem.errors import TandemError, WorkerStartFailed
from tandem.settings import SamplerSettings
from tandem.telemetry import configure_logging, get_log, log_context, serve_metrics
from tandem.v1 import sampler_pb2_grpc
from tandem.worker import (
    GRPC_OPTIONS,
    WorkerReport,
    WorkerSpec,
    hold_lifeline,
    read_spec,
    send_report,
)
from tandem.worker_access import SecretInterceptor

_STOP_GRACE = 1.0


def run(*, report_fd: int) -> int:
    """Reads the specification, serves until SIGTERM or a failure; returns the exit status."""
    spec = read_spec()
    hold_lifeline()
    faulthandler.enable()  # a crash in native code leaves its stacks in the log
    configure_logging(service="sampler", level=spec.log_level)
    with log_context(worker_id=spec.worker_id, session_id=spec.session_id):
        status = asyncio.run(_Process(spec, report_fd=report_fd).serve())
    # The engine's thread may be inside a step; there is nothing in this process to tidy up.
    os._exit(status)


class _Process:
    def __init__(self, spec: WorkerSpec, *, report_fd: int) -> None:
        self._spec = spec
        self._settings = spec.sampler or SamplerSettings()
        self._report_fd = report_fd
        self._metrics = SamplerMetrics(CollectorRegistry())
        self._health = health.aio.HealthServicer()
        self._servicer = SamplerServicer(
            timeout=self._settings.operation_timeout,
            metrics=self._metrics,
        )

    async def serve(self) -> int:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[TandemError | None] = loop.create_future()

        def end(error: TandemError | None) -> None:
            if not ended.done():
                ended.set_result(error)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end, None)
        server = await self._bind()
        threading.Thread(
            target=contextvars.copy_context().run,  # with it go the ids of log lines
            args=(self._run_engine, loop, lambda error: loop.call_soon_threadsafe(end, error)),
            name="engine",
            daemon=True,
        ).start()
        error = await ended
        await self._health.enter_graceful_shutdown()
        await server.stop(_STOP_GRACE if error is not None else 0)
        return 0 if error is None else 1

    async def _bind(self) -> grpc.aio.Server:
        server = grpc.aio.server(
            options=GRPC_OPTIONS, interceptors=[SecretInterceptor(self._spec.secret)]
        )
        sampler_pb2_grpc.add_SamplerServicer_to_server(self._servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        port = server.add_insecure_port(f"{self._spec.host}:0")
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await server.start()
        report = WorkerReport(
            address=f"{self._spec.host}:{port}",
            metrics_port=serve_metrics(self._metrics.registry, host=self._spec.host),
            pid=os.getpid(),
        )
        send_report(self._report_fd, report)
        return server

    def _run_engine(
        self, loop: asyncio.AbstractEventLoop, end: Callable[[TandemError], None]
    ) -> None:
        """Makes the engine and runs its scheduler, in one thread from first to last."""
        try:
            scheduler = self._make_scheduler(loop, end)
        except Exception as error:  # noqa: BLE001 (vLLM raises anything; the launcher is told)
            get_log().exception("start_failed")
            told = (
                error
                if isinstance(error, TandemError)
                else WorkerStartFailed(f"vLLM did not start with {self._spec.model_path}: {error}")
            )
            send_report(self._report_fd, WorkerReport(error_type=told.type, error=told.message))
            end(told)
            return
        scheduler.run()

    def _make_scheduler(
        self, loop: asyncio.AbstractEventLoop, end: Callable[[TandemError], None]
    ) -> Scheduler:
        started = time.monotonic()
        model = Path(self._spec.model_path)
        if not (model / "config.json").is_file():
            raise WorkerStartFailed(f"{model} holds no model: there is no config.json")
        # Garbage collection finds nothing while modules are imported and costs seconds.
        gc.disable()
        from sampler_service.model_files import is_tied
        from sampler_service.vllm_engine import VllmEngine

        imported = time.monotonic()
        gc.freeze()
        # vLLM warns of each of our settings; from the first request on its warnings count.
        logging.getLogger("vllm").setLevel(logging.ERROR)
        engine = VllmEngine(model, self._settings)
        # Some models are refused by a kernel only when it runs: better now than at a request.
        engine.score([0, 0])
        logging.getLogger("vllm").setLevel(logging.WARNING)
        # It names the modules without tensors of their own at each load; `reload.py` checks.
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
        loader = Loader(
            engine,
            base=model,
            tied=is_tied(model),
            tolerance=self._settings.canary_tolerance,
        )
        adapters = Adapters(
            engine,
            base=model,
            tolerance=self._settings.canary_tolerance or default_tolerance(engine.facts.dtype),
        )
        gc.freeze()
        gc.enable()
        scheduler = Scheduler(
            engine,
            loader,
            adapters,
            version=Version(name=f"base/{self._spec.model_name}", path=model),
            patience=self._settings.version_patience,
            metrics=self._metrics,
            on_fatal=end,
        )
        self._servicer.ready(
            Serving(
                facts=engine.facts, scheduler=scheduler, forms=FormCompiler(model, engine.facts)
            )
        )
        asyncio.run_coroutine_threadsafe(
            self._health.set("", health_pb2.HealthCheckResponse.SERVING), loop
        ).result(timeout=60)
        get_log().info(
            "ready",
            import_seconds=round(imported - started, 2),
            engine_seconds=round(time.monotonic() - imported, 2),
            engine=engine.facts.name,
            device=engine.facts.device,
            dtype=engine.facts.dtype,
        )
        return scheduler
