"""Keeps the engine of a sampler running.

An engine holds nothing that cannot be loaded again. One that dies is started again, with backoff,
and requests wait for the next one. If an engine cannot start, the waiting requests fail, and it is
started again at the next request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal, TypeVar

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.workers.backoff import Backoff
from gateway.workers.clients import SamplerClient, WorkerUnavailable
from gateway.workers.fleet import Fleet, Worker
from tandem.errors import TandemError, WorkerDied, WorkerStartFailed
from tandem.telemetry import get_log

EngineState = Literal["starting", "ready", "failed", "stopped"]

_Reply = TypeVar("_Reply")

_REPORT_PATIENCE = 5.0
"""Seconds within which the launcher reports the end of an engine whose connection broke."""


class EngineSupervisor:
    """Literal use: `reply = await supervisor.call(lambda client: client.sample(request),
    during="this sample")`. `on_exit` is called when the engine has ended by itself, and what was
    loaded into it is gone. `operation_timeout` in seconds."""

    def __init__(
        self,
        *,
        session_id: str,
        model: BaseModelEntry,
        fleet: Fleet,
        max_lora_rank: int,
        operation_timeout: float,
        on_exit: Callable[[], None],
    ) -> None:
        self.state: EngineState = "starting"
        self.reason = ""
        self.state_since = time.monotonic()
        self.worker: Worker | None = None
        self._session_id = session_id
        self._model = model
        self._fleet = fleet
        self._max_lora_rank = max_lora_rank
        self._timeout = operation_timeout
        self._tell_exit = on_exit
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._died = asyncio.Event()
        self._client: asyncio.Future[SamplerClient] = asyncio.get_running_loop().create_future()
        self._supervision = asyncio.create_task(self._keep(), name=f"sampler-{session_id}")
        self._log = get_log(session_id=session_id)

    async def ready(self) -> SamplerClient:
        """Return the client of an engine that serves. Raises the `WorkerStartFailed` of the start
        that was waited for, or the error that the engine was stopped with."""
        self._wanted.set()
        return await asyncio.shield(self._client)

    async def call(
        self,
        send: Callable[[SamplerClient], Awaitable[_Reply]],
        *,
        during: str,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> _Reply:
        """Return the engine's answer. If the engine dies meanwhile and the call `may_repeat`,
        return that of the next engine. Raises `WorkerDied`, and as `ready` and the call."""
        client = await self.ready()
        try:
            return await send(client)
        except WorkerUnavailable as error:
            if not may_repeat():
                raise WorkerDied(f"the sampler died during {during}: {error}") from error
            client = await self._next(client)
            try:
                return await send(client)
            except WorkerUnavailable as again:
                raise WorkerDied(f"the sampler died twice during {during}: {again}") from again

    async def stop(self, error: TandemError) -> None:
        """End the engine; requests that wait for it fail with the error."""
        self._set_state("stopped", error.message)
        self._supervision.cancel()
        if not self._client.done():
            self._client.set_exception(error)
            self._client.exception()  # marks it as retrieved, since nobody may be waiting
        await asyncio.gather(self._supervision, return_exceptions=True)
        if self.worker is not None:
            await self._fleet.stop(self.worker, reason=error.message)
            self.worker = None

    async def abandon(self) -> None:
        """Stop supervising without an error. The fleet ends the engine."""
        self._supervision.cancel()
        await asyncio.gather(self._supervision, return_exceptions=True)

    async def _next(self, broken: SamplerClient) -> SamplerClient:
        """Return the client of the engine after the broken one; of the same engine if the launcher
        reports no end, because then only the connection broke."""
        if self.worker is broken.worker:
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_PATIENCE):
                    await self._died.wait()
        return await self.ready()

    async def _keep(self) -> None:
        backoff = Backoff()
        while True:
            await self._wanted.wait()
            self._died.clear()
            self._set_state("starting", self.reason)
            try:
                worker = await self._fleet.start(
                    kind="sampler",
                    session_id=self._session_id,
                    model=self._model,
                    max_lora_rank=self._max_lora_rank,
                    on_exit=self._on_exit,
                )
            except WorkerStartFailed as error:
                await self._fail_to_start(error, backoff)
                continue
            except Exception as error:  # noqa: BLE001 - a fault of ours must not leave clients waiting
                self._log.exception("start_failed")
                sentence = f"{type(error).__name__} while the sampler started; see the log"
                await self._fail_to_start(WorkerStartFailed(sentence), backoff)
                continue
            backoff.ready()
            if not self._died.is_set():  # it may have ended at the moment when it became ready
                self.worker = worker
                self._set_state("ready")
                self._client.set_result(SamplerClient(worker, timeout=self._timeout))
            await self._died.wait()
            try:
                await self._fleet.stop(worker, reason=self.reason)
            except Exception:  # noqa: BLE001 - the next one must start all the same
                self._log.exception("engine_not_stopped", worker_id=worker.worker_id)
            await asyncio.sleep(backoff.failed())

    async def _fail_to_start(self, error: WorkerStartFailed, backoff: Backoff) -> None:
        self._set_state("failed", error.message)
        self._wanted.clear()  # the next request starts it again
        self._client.set_exception(error)
        self._client.exception()  # marks it as retrieved, since nobody may be waiting
        self._client = asyncio.get_running_loop().create_future()
        await asyncio.sleep(backoff.failed())

    def _on_exit(self, reason: str) -> None:
        self.worker = None
        self._tell_exit()
        self._set_state("starting", reason)
        if self._client.done():  # otherwise requests wait on, for the next engine
            self._client = asyncio.get_running_loop().create_future()
        self._died.set()

    def _set_state(self, state: EngineState, reason: str = "") -> None:
        self.state = state
        self.reason = reason
        self.state_since = time.monotonic()
