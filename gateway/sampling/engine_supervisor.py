"""Keeps the engine of a sampler running.

It holds nothing that cannot be loaded again, so that one that dies is started again, with
back-off, and whoever waits for it waits for the next one. One that cannot start fails those who
wait for it, and is tried again when somebody asks again.
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
"""Seconds to wait for the launcher's word after a connection broke."""


class EngineSupervisor:
    """Literal use: `reply = await keeper.call(lambda client: client.sample(request),
    during="this sample")`. `on_exit` is told when the engine has ended unasked; what was loaded
    into it is gone."""

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
        self._keeper = asyncio.create_task(self._keep(), name=f"sampler-{session_id}")
        self._log = get_log(session_id=session_id)

    async def ready(self) -> SamplerClient:
        """The client of an engine that serves. Raises the `WorkerStartFailed` of the start that
        was waited for, or what the engine was stopped with."""
        self._wanted.set()
        return await asyncio.shield(self._client)

    async def call(
        self,
        send: Callable[[SamplerClient], Awaitable[_Reply]],
        *,
        during: str,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> _Reply:
        """The engine's answer; when it dies meanwhile, that of the next one, if it `may_repeat`.
        Raises `WorkerDied`, and what `ready` and the call itself raise."""
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
        """Ends the engine; whoever waits for it gets the error."""
        self._set_state("stopped", error.message)
        self._keeper.cancel()
        if not self._client.done():
            self._client.set_exception(error)
            self._client.exception()  # it may be that nobody waits
        await asyncio.gather(self._keeper, return_exceptions=True)
        if self.worker is not None:
            await self._fleet.stop(self.worker, reason=error.message)
            self.worker = None

    async def abandon(self) -> None:
        """Stops keeping it, without telling anybody. The fleet ends the engine."""
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)

    async def _next(self, broken: SamplerClient) -> SamplerClient:
        """The client of the engine that comes after the broken one; the same one if the
        launcher does not report an end, since then it was the connection alone."""
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
            if not self._died.is_set():  # it may have ended just as it became ready
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
        self._wanted.clear()  # it is tried again when somebody asks again
        self._client.set_exception(error)
        self._client.exception()  # it may be that nobody waits
        self._client = asyncio.get_running_loop().create_future()
        await asyncio.sleep(backoff.failed())

    def _on_exit(self, reason: str) -> None:
        self.worker = None
        self._tell_exit()
        self._set_state("starting", reason)
        if self._client.done():  # else whoever waits for it goes on waiting, for the next engine
            self._client = asyncio.get_running_loop().create_future()
        self._died.set()

    def _set_state(self, state: EngineState, reason: str = "") -> None:
        self.state = state
        self.reason = reason
        self.state_since = time.monotonic()
