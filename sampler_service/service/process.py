"""Runs the sampler's process: bind, report, make the engine, serve, stop.

The port is bound and reported before vLLM is imported. The engine is made in the thread that steps
it, or in its own process, forked first (`engine_process.py`). Until it is ready, the gRPC health is
NOT_SERVING."""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from prometheus_client import CollectorRegistry

from sampler_service.metrics import SamplerMetrics
from sampler_service.scheduler import Scheduler
from sampler_service.service.engine_process import EngineProcess
from sampler_service.service.engine_server import Start
from sampler_service.service.parser_process import ParserProcess
from sampler_service.service.servicer import SamplerServicer
from sampler_service.structured_output import GrammarCompiler
from sampler_service.vllm.environment import in_own_process
from sampler_service.vllm.libraries import import_libraries
from sampler_service.vllm.start import start_engine
from sampler_service.weights.loader import LoadableVersion
from tandem.errors import TandemError, WorkerDied, WorkerStartFailed, describe
from tandem.protocol.devices import confine, devices_of_ranks, together
from tandem.protocol.fencing import Fence
from tandem.protocol.worker import WorkerReport, WorkerSpec
from tandem.protocol.worker_link import LauncherLink, launcher_link
from tandem.protocol.worker_server import WorkerServer
from tandem.settings.workers import SamplerSettings
from tandem.telemetry import configure_logging, get_log, log_context
from tandem.v1 import sampler_pb2_grpc

_STOP_GRACE_SECONDS = 1.0
"""Seconds in which calls still get the answer that the engine failed."""


def run() -> NoReturn:
    """Read the specification, serve until SIGTERM or a failure, and end the process."""
    link = launcher_link()
    link.preload(import_libraries)
    spec = link.read_spec()
    link.hold_lifeline()
    faulthandler.enable()  # logs the stacks of a crash in native code
    configure_logging(service="sampler", level=spec.log_level)
    try:
        settings = _confine(spec.sampler or SamplerSettings(), spec.devices)
    except TandemError as error:
        link.report(WorkerReport.of_error(error))
        os._exit(1)
    with log_context(worker_id=spec.worker_id, session_id=spec.session_id):
        model = Path(spec.model_path)
        start = partial(start_engine, model, settings, sleeps=spec.lease > 0)
        if in_own_process(settings):
            patience = settings.operation_timeout
            process = EngineProcess.fork(start, model=model, patience=patience)
            status = asyncio.run(_Process(spec, settings, link, process.connect).serve())
            process.kill_engine()
        else:
            status = asyncio.run(_Process(spec, settings, link, start).serve())
    # The engine's thread may be inside a step, and this process needs no clean-up.
    os._exit(status)


def _confine(settings: SamplerSettings, names: Sequence[str]) -> SamplerSettings:
    """Confine this process to its devices. Returns the settings for them.

    Raises `WorkerStartFailed`."""
    devices = devices_of_ranks(names, ranks=settings.ranks)
    if not devices:
        return settings
    device = together(devices)
    confine(device)
    return settings.model_copy(update={"device": device.kind})


class _Process:
    def __init__(
        self, spec: WorkerSpec, settings: SamplerSettings, link: LauncherLink, start: Start
    ) -> None:
        self._spec = spec
        self._link = link
        self._start = start
        self._settings = settings
        self._metrics = SamplerMetrics(CollectorRegistry())
        self._servicer = SamplerServicer(
            fence=Fence(spec.lease),
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
        server = WorkerServer(self._spec)
        sampler_pb2_grpc.add_SamplerServicer_to_server(self._servicer, server.grpc)
        self._link.report(await server.listen(self._metrics.registry))

        def set_serving() -> None:
            asyncio.run_coroutine_threadsafe(server.set_serving(True), loop).result(timeout=60)

        def fail(error: TandemError) -> None:
            loop.call_soon_threadsafe(end, error)

        threading.Thread(
            target=contextvars.copy_context().run,  # keeps the ids of log lines
            args=(self._run_engine, set_serving, fail),
            name="engine",
            daemon=True,
        ).start()
        error = await ended
        if error is not None:
            self._servicer.end()
        await server.stop_serving(_STOP_GRACE_SECONDS if error is not None else 0)
        return 0 if error is None else 1

    def _run_engine(
        self, set_serving: Callable[[], None], fail: Callable[[TandemError], None]
    ) -> None:
        """Make the engine and run its scheduler in this thread."""
        try:
            scheduler = self._make_scheduler(fail)
            set_serving()
        except Exception as error:  # noqa: BLE001 (vLLM raises anything; it is reported)
            get_log().exception("start_failed")
            reported = (
                error
                if isinstance(error, TandemError)
                else WorkerStartFailed(
                    f"vLLM did not start with {self._spec.model_name}: {describe(error)}"
                )
            )
            self._link.report(WorkerReport.of_error(reported))
            fail(reported)
            return
        scheduler.run()

    def _make_scheduler(self, fail: Callable[[TandemError], None]) -> Scheduler:
        started = time.monotonic()
        model = Path(self._spec.model_path)
        engine = self._start(lambda: fail(WorkerDied("a process of the engine has ended")))
        facts = engine.facts
        gc.freeze()
        gc.enable()
        scheduler = Scheduler.of_engine(
            engine,
            base=LoadableVersion(name=f"base/{self._spec.model_name}", path=model),
            timeout=self._settings.operation_timeout,
            metrics=self._metrics,
            on_fatal=fail,
        )
        grammars = GrammarCompiler(model, vocabulary=facts.vocabulary, end_tokens=facts.end_tokens)
        messages = ParserProcess(model, facts.end_tokens)
        self._servicer.ready(facts, scheduler, grammars, messages)
        get_log().info(
            "ready",
            seconds=round(time.monotonic() - started, 2),
            engine=facts.name,
            device=facts.device,
            dtype=facts.dtype,
            max_length=facts.max_length,
            model_length=facts.model_length,
        )
        return scheduler
