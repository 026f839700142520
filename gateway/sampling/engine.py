"""An engine of a sampler, from its start to its end.

The supervisor starts, wakes and ends its process (`gateway.workers`). The engine describes the
process and knows its weights. It starts with the first request, or an earlier gateway started it.
All its state can be loaded again. If it dies while requests need it, it starts again. The `Sampler`
chooses the engine of a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.checkpoints.pins import Pins
from gateway.identifiers import relative_version_folder
from gateway.owners.usage.meter import TimeShares
from gateway.workers.clients import EXIT_REPORT_PATIENCE, WorkerUnavailable
from gateway.workers.engine_adapter import EngineAdapter
from gateway.workers.groups import WorkerGroup
from gateway.workers.needs import engine_share
from gateway.workers.processes import Processes
from gateway.workers.run_options import RunOptions
from gateway.workers.sampler_client import SamplerClient
from gateway.workers.standing import are_side_by_side, reason_of_wait
from gateway.workers.supervisor import Supervisor
from gateway.workers.table import WorkerRow
from gateway.workers.worker import Worker
from tandem.errors import TandemError, WorkerDied, WorkerStartFailed
from tandem.protocol.worker import WorkerSpec
from tandem.settings.workers import SamplerSettings
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, sampler_pb2

EngineState = Literal["idle", "queued", "starting", "ready", "failed", "stopped"]
"""An `idle` engine starts with the next request. A `queued` one waits for its place or start."""

_MOST_REFUSALS = 1000
_MOST_HANDOFFS_REFUSED = 3

_Reply = TypeVar("_Reply")


class EngineLost(Exception):
    """The engine ended while a call waited for its devices. The call was not sent."""


@dataclass(eq=False, kw_only=True)
class SamplerEngine:
    """Serves one full set of weights at a time, and adapters of up to `max_lora_rank` on top of the
    base model.

    `key` names its row, `sampler` is the key of its sampler, and `replica` its number there.
    `session_id` is the session that first needed the sampler. `reason` explains its last end or
    failed start. `weights` names its full weights: a version, or `base/NAME` for the base model.
    `demand` counts the sampler's unfinished samples and loads. While it is above 0, a dead process
    is replaced. `on_change` is called when the engine serves, and with an error when it did not
    start or is stopped."""

    key: str
    sampler: str
    replica: int = 0
    session_id: str
    model: BaseModelEntry
    max_lora_rank: int
    settings: SamplerSettings
    options: RunOptions
    supervisor: Supervisor
    adapter: EngineAdapter
    processes: Processes
    pins: Pins

    def __post_init__(self) -> None:
        self.reason = ""
        self.demand = 0
        self.on_change: Callable[[TandemError | None], None] = lambda _error: None
        self.worker: Worker | None = None
        self.weights = f"base/{self.model.name}"
        self.shares = TimeShares()
        self._state: EngineState = "idle"
        self.refused: dict[str, str] = {}
        """Versions that its process refused although others serve them, with the reasons."""
        self._handoffs_refused = 0
        self._adapters: dict[str, None] = {}
        self._state_since = time.monotonic()
        self._died = asyncio.Event()
        self._client: SamplerClient | None = None
        self._starting: asyncio.Task[None] | None = None
        self._doubt: asyncio.Task[None] | None = None
        self._wanted: list[common_pb2.WeightVersion] = []
        """The versions for the waiting calls."""
        self._log = get_log(session_id=self.session_id)
        self.pins.pin(relative_version_folder(self.weights))

    @property
    def row(self) -> WorkerRow | None:
        return self.supervisor.roster.rows.get(self.key)

    @property
    def state(self) -> EngineState:
        row = self.row
        if self._state == "queued" and row is not None and row.has_process:
            return "starting"
        return self._state

    @property
    def has_devices(self) -> bool:
        """Whether a call could begin at once."""
        row = self.row
        return row is not None and row.state == "awake"

    @property
    def waits_for_devices(self) -> bool:
        """Whether calls wait for its devices."""
        return self.row is not None and bool(self.supervisor.roster.calls_of(self.key).waiting)

    def is_beside(self, trainer: str) -> bool:
        """Whether it and a trainer are awake on one device."""
        return self.serves and are_side_by_side(self.supervisor.overview(), self.key, trainer)

    @property
    def ranks(self) -> int:
        """The number of devices over which its weights are split."""
        return self.options.sampler_ranks

    @property
    def process(self) -> str:
        """The id of its process, or ""."""
        return self.worker.worker_id if self.worker is not None else ""

    @property
    def serves(self) -> bool:
        """Whether it has a process that answers its heartbeat."""
        return self._state == "ready" and not self.silence

    @property
    def silence(self) -> str:
        """A sentence if the engine does not answer its heartbeat, or ""."""
        return self.worker.silence if self.worker is not None else ""

    def explain(self) -> str:
        """Return a sentence about the engine's work, or why it does not serve yet."""
        waits = reason_of_wait(self.supervisor.overview(), self.key)
        if self._state == "ready":
            return "; ".join(filter(None, (self.silence, waits))) or "the sampler is at work"
        age = time.monotonic() - self._state_since
        row = self.row
        if row is None or not row.group:
            return f"the sampler waits for its place ({age:.0f} s): {waits or 'nobody uses it now'}"
        if row.state == "starting":
            why = f"; it failed before: {self.reason}" if self.reason else ""
            starts = f": {about}" if (about := self.adapter.explain(row)) else ""
            return f"the sampler is starting ({age:.0f} s){starts}{why}"
        return f"the sampler is not started yet ({age:.0f} s): {waits or row.reason or row.state}"

    # --- Its calls ----------------------------------------------------------------------------

    async def call(
        self,
        send: Callable[[SamplerClient], Awaitable[_Reply]],
        *,
        version: common_pb2.WeightVersion,
    ) -> _Reply:
        """Send a call for a `version` once the engine is awake, and return the answer. Raises
        `EngineLost`, `OperationTimedOut` if nobody answered for the engine, and as the call."""
        begun = False
        self._wanted.append(version)
        try:
            async with self.supervisor.use(self.key) as row:
                begun = True
                self._wanted.remove(version)
                if self._client is None or row.process != self.process:
                    raise EngineLost
                return await send(self._client)
        except (WorkerStartFailed, WorkerDied) as error:
            if begun:
                raise
            raise EngineLost from error
        finally:
            if not begun:
                self._wanted.remove(version)

    async def describe(self) -> sampler_pb2.DescribeSamplerReply | None:
        """Return its description now, None if it is not awake or does not answer."""
        if self._client is None or not self.has_devices:
            return None
        with suppress(WorkerUnavailable, TandemError):
            return await self._client.describe()
        return None

    def doubt(self, worker: Worker) -> None:
        """Find out whether a worker that failed to answer has ended."""
        if self.worker is worker and not self.is_doubted:
            self._doubt = asyncio.create_task(self._find_out(worker), name="engine-doubted")

    @property
    def is_doubted(self) -> bool:
        return self._doubt is not None and not self._doubt.done()

    async def _find_out(self, worker: Worker) -> None:
        await self.processes.await_exit(worker.worker_id, self._died, patience=EXIT_REPORT_PATIENCE)
        self._doubt = None
        self.on_change(None)

    # --- Its weights --------------------------------------------------------------------------

    @property
    def loaded(self) -> set[str]:
        """The full weights and the adapters of the last answers, for status and balancer only.
        Every call names its version, and the engine loads it."""
        return {self.weights, *self._adapters}

    def note_loaded(self, name: str, *, adapter: bool) -> None:
        """Note the weights of an answer."""
        if self._state == "stopped":
            return
        self.refused.pop(name, None)
        # An adapter is served on top of the base model's weights.
        self._set_weights(f"base/{self.model.name}" if adapter else name)
        if adapter:
            self._adapters.pop(name, None)
            self._adapters[name] = None
            if len(self._adapters) > self.settings.max_adapters:
                del self._adapters[next(iter(self._adapters))]

    def note_handoff(self, *, taken: bool) -> None:
        """Note whether its process took weights from a trainer's memory."""
        self._handoffs_refused = 0 if taken else self._handoffs_refused + 1

    @property
    def takes_handoffs(self) -> bool:
        """Whether weights in memory are worth an attempt. Its next process is asked again."""
        return self._handoffs_refused < _MOST_HANDOFFS_REFUSED

    def note_refused(self, name: str, reason: str) -> None:
        """Note that it gets no samples of a version, until it loads that or starts again."""
        self.refused.pop(name, None)
        self.refused[name] = reason
        if len(self.refused) > _MOST_REFUSALS:
            del self.refused[next(iter(self.refused))]

    def _set_weights(self, name: str) -> None:
        """Note its full weights, and pin them, since a failed load returns to them."""
        self.pins.pin(relative_version_folder(name))
        self.pins.unpin(relative_version_folder(self.weights))
        self.weights = name

    def wanted_version(self) -> common_pb2.WeightVersion | None:
        return self._wanted[0] if self._wanted else None

    def note_woken(self, version: str) -> None:
        self.note_loaded(version, adapter=False)

    # --- From its start to its end ------------------------------------------------------------

    def start(self) -> None:
        """Start it, unless it runs or starts already. It must have a row."""
        if self._state in ("idle", "failed"):
            self._set_state("queued", self.reason)
            self._starting = asyncio.create_task(self._start(), name=f"sampler-{self.session_id}")

    def take_up(self) -> asyncio.Task[None]:
        """Continue with the process of an earlier gateway, if it is useful. The task ends when
        that is known."""
        self._set_state("queued")
        self._register()
        self._starting = asyncio.create_task(self._take_up(), name=f"take-up-{self.key}")
        return self._starting

    async def _take_up(self) -> None:
        await self.supervisor.await_found([self.key])
        row, worker = self.row, self.adapter.worker(self.key)
        if row is not None and row.state in ("awake", "asleep") and worker is not None:
            self._serve(worker)
            return
        self._set_state("idle", row.reason if row is not None else "")
        if self.demand:
            self.start()

    def note_found(self, about: sampler_pb2.DescribeSamplerReply) -> None:
        """Note the weights of an earlier gateway's process."""
        self._set_weights(about.version.name)
        self._adapters = dict.fromkeys(about.adapters)

    async def stop(self, error: TandemError) -> None:
        """End it. Returns when nothing of it is left."""
        self._set_state("stopped", error.message)
        self.on_change(error)
        await self._cancel_tasks()
        self._forget_process()
        await self.supervisor.release(self.key, holder=self.sampler)
        self.adapter.unregister(self.key)

    async def rest(self) -> None:
        """Give back its place. Return when nothing is left of its process. The next request starts
        it again."""
        self._forget_process()
        self._set_state("idle", "nobody used it")
        await self.supervisor.release(self.key, holder=self.sampler)

    async def abandon(self) -> None:
        """Leave the process to the next gateway."""
        self._set_state("stopped")
        await self._cancel_tasks()

    async def _cancel_tasks(self) -> None:
        tasks = [task for task in (self._starting, self._doubt) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self) -> None:
        """Start the engine for all waiting calls."""
        self._register()
        try:
            async with self.supervisor.use(self.key) as row:
                self._serve(self.adapter.require(row))
                await asyncio.sleep(0)  # the waiting calls begin meanwhile, so that it is not idle
        except Exception as error:  # noqa: BLE001 - our own fault must not hang the clients
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Note that it has no place, or did not start."""
        if not isinstance(error, TandemError):
            self._log.error("start_failed", exc_info=error)
            sentence = f"{type(error).__name__} while the sampler started; see the log"
            error = WorkerStartFailed(sentence)
        self._set_state("failed", error.message)
        self.on_change(error)

    def _register(self) -> None:
        self.adapter.register(self.key, self)
        self.supervisor.watch_ends(self.key, self._note_end)

    def _serve(self, worker: Worker) -> None:
        self.worker = worker
        self._died.clear()
        self._set_state("ready")
        self._client = SamplerClient(
            worker,
            timeout=self.settings.operation_timeout,
            give_up=lambda reason: self.processes.fail(worker, reason),
        )
        self.on_change(None)

    def _note_end(self, process: str, reason: str) -> None:
        """Note that nothing is left of a process."""
        if process != self.process:
            return
        self._forget_process()
        self._died.set()
        if self._state != "stopped":
            self._set_state("idle", reason)
            if self.demand:
                self.start()

    def _forget_process(self) -> None:
        self.worker = self._client = None
        self._set_weights(f"base/{self.model.name}")
        self._adapters.clear()
        self.refused.clear()
        self._handoffs_refused = 0

    def _set_state(self, state: EngineState, reason: str = "") -> None:
        self._state = state
        self.reason = reason
        self._state_since = time.monotonic()

    def specification(self, row: WorkerRow, group: WorkerGroup) -> WorkerSpec:
        """Describe the next process, with the engine's share of each device."""
        settings = self.settings.model_copy(
            update={"ranks": row.request.ranks, "max_lora_rank": self.max_lora_rank}
        )
        chosen = {"gpu_memory_bytes", "gpu_memory_utilization"} & settings.model_fields_set
        if not chosen and (share := engine_share(group, row.request)):
            settings = settings.model_copy(update={"gpu_memory_bytes": share})
        return WorkerSpec(
            worker_id="",
            secret="",
            kind="sampler",
            session_id=self.session_id,
            model_name=self.model.name,
            model_path=self.model.path,
            replica=self.replica,
            sampler=settings,
        )
