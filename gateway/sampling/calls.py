"""Calls of samples and loads on their way to a sampler's engines.

If an engine dies, its calls are sent once more. A call may also be taken back from a leaving or
overfull engine, and goes to another one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from gateway.checkpoints.versions import WeightVersion
from gateway.sampling.balancer import Balancer, Work
from gateway.sampling.engine import EngineLost, SamplerEngine
from gateway.sampling.replicas import Replicas
from gateway.workers.clients import WorkerUnavailable
from gateway.workers.requests import WorkerRequest
from gateway.workers.sampler_client import Answer, SamplerClient
from gateway.workers.worker import Worker
from tandem.errors import LoadFailed, OperationTimedOut, TandemError, WorkerDied
from tandem.telemetry import get_log
from tandem.v1 import common_pb2


@dataclass(eq=False, kw_only=True)
class AssignedCall:
    """A call to the assigned `engine`. `during` describes it in messages. `worker` is the process
    that received it, None before. `task` awaits the answer. A call `taken_back` goes to the engine
    `to`, or to any."""

    work: Work
    version: common_pb2.WeightVersion
    during: str
    engine: SamplerEngine
    may_repeat: Callable[[], bool] = lambda: True
    worker: Worker | None = None
    task: asyncio.Task[object] | None = None
    taken_back: bool = False
    to: SamplerEngine | None = None

    def take_back(self, *, to: SamplerEngine | None = None) -> None:
        if self.task is not None and not self.taken_back and self.may_repeat():
            self.taken_back, self.to = True, to
            self.task.cancel()

    def was_only_taken_back(self) -> bool:
        """Return whether the task was cancelled only to take the call back. It then continues."""
        return self.taken_back and self.task is not None and not self.task.uncancel()


@dataclass(eq=False, kw_only=True)
class SamplerCalls:
    """The unfinished calls of a sampler, with its `balancer` and its `replicas`. `Replicas`
    describes the arguments. `stopped` is the error of new calls after the sampler's end."""

    first: SamplerEngine
    prepare: Callable[[SamplerEngine], Awaitable[None]]
    requests: Callable[[int], Sequence[WorkerRequest]]
    stopped: TandemError | None = None

    def __post_init__(self) -> None:
        self.balancer = Balancer(
            lambda work: self.replicas.serving("" if work.loads else work.version),
            lambda work: None if work.loads else self.replicas.refusal(work.version),
        )
        self.replicas = Replicas(
            first=self.first,
            balancer=self.balancer,
            take_back=self._take_back,
            prepare=self.prepare,
            spread=self._spread,
            failed=self.balancer.fail,
            requests=self.requests,
        )
        self._under_way: dict[AssignedCall, None] = {}  # in order of sending
        self.unwritten: dict[str, asyncio.Future[WeightVersion]] = {}
        """Versions that an engine has from memory, whose files are being written."""
        self._log = get_log(session_id=self.first.session_id)

    @property
    def sent_samples(self) -> int:
        """The number of sample calls that an engine has."""
        return sum(call.worker is not None for call in self._under_way if call.work.samples)

    def samples_at(self, engine: SamplerEngine, *, but: str) -> set[AssignedCall]:
        """Return the sample calls that an engine has, except those of a version."""
        calls = (call for call in self._under_way if call.engine is engine and call.work.samples)
        return {call for call in calls if call.worker is not None and call.version.name != but}

    # --- Assigned and sent --------------------------------------------------------------------

    async def assigned(self, work: Work) -> SamplerEngine:
        """Return a serving engine with room, started if needed. Raises the start's
        `WorkerStartFailed`, or the error that stopped the sampler."""
        if self.stopped is not None:
            raise self.stopped
        self.replicas.start()
        return await self.balancer.assign(work)

    async def send_call(
        self, call: AssignedCall, send: Callable[[SamplerClient], Awaitable[Answer]]
    ) -> Answer:
        """Send an assigned call and return the answer. If the engine dies and the call
        `may_repeat`, or it is taken back, send it to another engine. If nobody answers for the
        engine, another one gets the call once. Raises `WorkerDied`, and as `assigned` and the
        call."""
        died = late = False
        waited: asyncio.Future[WeightVersion] | None = None
        while True:
            engine = call.engine
            try:
                # It may follow a newer version by now.
                if not call.work.samples or call.version.name not in engine.refused:
                    written = self.unwritten.get(call.version.name)
                    reply = await self.ask(call, send)
                    lacks_files = reply.failure.type == LoadFailed.type and call.work.samples > 0
                    if lacks_files and written is not None and written is not waited:
                        waited = written
                        await asyncio.wait({written})
                    elif not self._is_refused_alone(call, reply):
                        return reply
            except EngineLost:
                pass
            except OperationTimedOut:
                others = (each for each in self.replicas.engines if each is not engine)
                if late or call.worker is not None or not any(each.serves for each in others):
                    raise
                late = True
            except asyncio.CancelledError:
                if not call.was_only_taken_back():
                    raise
            except WorkerUnavailable as error:
                if died:
                    raise WorkerDied(
                        f"the sampler died twice during {call.during}: {error}"
                    ) from error
                if not call.may_repeat():
                    raise WorkerDied(f"the sampler died during {call.during}: {error}") from error
                died = True
                assert call.worker is not None
                engine.doubt(call.worker)
            finally:
                self.balancer.end(engine, call.work)
                self._relieve(engine)
            call.work = replace(call.work, version=call.version.name)
            if call.to is not None and self.balancer.give(call.to, call.work):
                call.engine = call.to
            else:
                call.engine = await self.assigned(call.work)

    async def until_written(self, version: str) -> None:
        """Wait for the files of a version that an engine has from memory."""
        if (written := self.unwritten.get(version)) is not None:
            await asyncio.wait({written})

    def _is_refused_alone(self, call: AssignedCall, reply: Answer) -> bool:
        """Whether an engine cannot load a sample's version, and another engine has it."""
        name, failure = call.version.name, reply.failure
        others = (each for each in self.replicas.serving(name) if each is not call.engine)
        refused = failure.type == LoadFailed.type and call.work.samples > 0
        alone = refused and any(name in each.loaded for each in others)
        if alone:
            self.note_refused(call.engine, name, failure.message)
        return alone

    async def ask(
        self, call: AssignedCall, send: Callable[[SamplerClient], Awaitable[Answer]]
    ) -> Answer:
        """Return the engine's answer. The call can be taken back meanwhile."""

        async def noted(client: SamplerClient) -> Answer:
            call.worker = client.worker
            return await send(client)

        call.worker, call.taken_back, call.to = None, False, None
        # Not a new task, which would cost a turn of the event loop each way.
        call.task, self._under_way[call] = asyncio.current_task(), None
        try:
            return await call.engine.call(noted, version=call.version)
        finally:
            del self._under_way[call]

    def note_refused(self, engine: SamplerEngine, name: str, reason: str) -> None:
        """Send an engine no more samples of a version that other engines serve."""
        engine.note_refused(name, reason)
        self._log.warning("version_degraded", version=name, engine=engine.process, reason=reason)
        for call in [*self._under_way]:
            unsent = call.engine is engine and call.worker is None
            if unsent and call.version.name == name and call.work.samples:
                call.take_back()
        self.balancer.assign_waiting()

    # --- Taken back ---------------------------------------------------------------------------

    def _take_back(self, engine: SamplerEngine, sent: bool) -> None:
        """Take back an engine's unsent calls, or with `sent` all its repeatable calls."""
        for call in [*self._under_way]:
            if call.engine is engine and (sent or call.worker is None):
                call.take_back()

    def _relieve(self, idle: SamplerEngine) -> None:
        """Give an idle engine half of the samples that wait for devices at each other engine."""
        if self.balancer.load_of(idle).requests or not idle.has_devices:
            return
        serving = self.replicas.serving()
        for other in serving if idle in serving else ():
            if other.waits_for_devices:
                calls = [c for c in self._under_way if c.engine is other and c.worker is None]
                calls = [call for call in calls if call.work.samples]
                for call in calls[len(calls) // 2 :]:
                    call.take_back(to=idle)

    def _spread(self) -> None:
        samples: Counter[SamplerEngine] = Counter()
        for call in [*self._under_way]:
            first = not samples[call.engine]
            samples[call.engine] += call.work.samples
            beyond = samples[call.engine] > self.balancer.most_samples > 0
            if beyond and call.work.samples and not first:
                call.take_back()
