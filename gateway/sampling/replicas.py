"""The engines of one sampler: their number, their starts and their ends.

A new engine beside serving ones loads the last used version before it gets requests. Then surplus
requests of the other engines are taken back and spread. A leaving engine gets no new requests. Its
unsent requests go to other engines at once, and its sent ones after `_PATIENCE`. Then it ends and
gives its place back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Literal

from gateway.sampling.balancer import Balancer
from gateway.sampling.engine import SamplerEngine
from gateway.workers.request_maker import engine_key
from gateway.workers.requests import WorkerRequest
from gateway.workers.run_options import RunOptions
from tandem.errors import LoadFailed, TandemError, WorkerStartFailed
from tandem.telemetry import get_log

VersionState = Literal["live", "degraded", "partial"]
"""All serving engines have a `live` version. Some engine refused a `degraded` one, and gets no
samples of it. A `partial` one is loaded by further engines for their next sample."""

_PATIENCE = 300.0
"""Seconds in which a leaving engine may finish its sent requests."""


@dataclass(frozen=True)
class ReplicaRange:
    """The least and most engines of a sampler. Between them, their number follows its queue."""

    least: int
    most: int

    @classmethod
    def of(cls, options: RunOptions) -> ReplicaRange | None:
        """Return the range of a run or session, None if its number of engines is fixed."""
        return cls(options.min_replicas, options.max_replicas) if options.max_replicas else None


@dataclass(eq=False)
class _Leaving:
    """A leaving engine. Once it is `ending`, it cannot come back."""

    engine: SamplerEngine
    task: asyncio.Task[None] | None = None
    ending: bool = False


@dataclass(eq=False, kw_only=True)
class Replicas:
    """`first` is the engine with the number 0, which always exists. `take_back` takes an engine's
    unsent calls back for others, or with True all repeatable calls. `prepare` returns when a
    serving engine is ready for requests. `spread` takes back surplus requests of engines. `failed`
    is called when no engine serves, starts or waits. `requests` returns the requests for the rows
    of a number of engines. `allowed` is None for a fixed number. `scaled` if a request set it."""

    first: SamplerEngine
    balancer: Balancer[SamplerEngine]
    take_back: Callable[[SamplerEngine, bool], None]
    prepare: Callable[[SamplerEngine], Awaitable[None]]
    spread: Callable[[], None]
    failed: Callable[[TandemError], None]
    requests: Callable[[int], Sequence[WorkerRequest]]
    allowed: ReplicaRange | None = None
    scaled: bool = False

    def __post_init__(self) -> None:
        self.engines = [self.first]
        self._leaving: dict[int, _Leaving] = {}
        self._preparing: dict[SamplerEngine, asyncio.Task[None]] = {}
        self._placing: asyncio.Task[None] | None = None
        self.first.on_change = partial(self._on_change, self.first)
        self._log = get_log(session_id=self.first.session_id)

    @property
    def running(self) -> int:
        """The number of engines with a place or on the way to it."""
        return sum(each.row is not None or each.state != "idle" for each in self.engines)

    @property
    def leaving(self) -> Sequence[SamplerEngine]:
        return [each.engine for each in self._leaving.values()]

    def serving(self, version: str = "") -> Sequence[SamplerEngine]:
        """Return the engines that get requests: prepared ones that answer, or else all ready ones.
        Samples of a `version` never go to an engine that refused it."""
        ready = [each for each in self.engines if each.state == "ready" and not each.is_doubted]
        ready = [each for each in ready if version not in each.refused]
        return [each for each in ready if not each.silence and each not in self._preparing] or ready

    def state_of(self, version: str) -> VersionState:
        if any(version in engine.refused for engine in self.engines):
            return "degraded"
        serving = self.serving()
        has_all = bool(serving) and all(version in engine.loaded for engine in serving)
        return "live" if has_all else "partial"

    def refusal(self, version: str) -> LoadFailed | None:
        """Return why no engine will sample a version, None if one can."""
        reasons = [engine.refused.get(version, "") for engine in self.engines]
        ended = [engine.state in ("idle", "failed", "stopped") for engine in self.engines]
        if self._placing is not None or not any(reasons):
            return None
        if not all(reason or end for reason, end in zip(reasons, ended, strict=True)):
            return None
        return LoadFailed(
            f"no engine of the sampler has {version}: {next(filter(None, reasons))}. Save the "
            "weights again"
        )

    def explain(self) -> str:
        """Return a sentence about their work, or why none serves yet."""
        serving = sum(engine.serves for engine in self.engines)
        if serving and len(self.engines) > 1:
            return f"{serving} of {len(self.engines)} engines of the sampler are at work"
        return self.first.explain()

    # --- How many there are -------------------------------------------------------------------

    def resize(self, number: int) -> None:
        """Set the number of engines. New ones start with the next request. Await `settled` before
        that, so that no returning engine is `ending`."""
        for engine in self.engines[number:]:
            self._let_go(engine)
        del self.engines[number:]
        for replica in range(len(self.engines), number):
            self.engines.append(self._taken_back(replica) or self._made(replica))
        # A single engine takes all requests.
        self.balancer.most_samples = self.first.settings.max_num_seqs if number > 1 else 0
        self.balancer.assign_waiting()

    async def settled(self) -> int:
        """Wait until no engine is ending. Return the number of engines with the leaving ones that
        can come back, which they can until the next await."""
        while ending := [each.task for each in self._leaving.values() if each.ending and each.task]:
            await asyncio.wait(ending)
        return next(number for number in count(len(self.engines)) if number not in self._leaving)

    def _made(self, replica: int) -> SamplerEngine:
        key = engine_key(self.first.key, replica)
        engine = replace(self.first, key=key, replica=replica)
        engine.demand, engine.on_change = self.first.demand, partial(self._on_change, engine)
        return engine

    def _taken_back(self, replica: int) -> SamplerEngine | None:
        leaving = self._leaving.pop(replica, None)
        if leaving is None:
            return None
        assert leaving.task is not None and not leaving.ending
        leaving.task.cancel()
        leaving.engine.demand = self.first.demand
        return leaving.engine

    def _let_go(self, engine: SamplerEngine) -> None:
        engine.demand = 0  # if its process dies, no other replaces it
        leaving = self._leaving[engine.replica] = _Leaving(engine)
        leaving.task = asyncio.create_task(self._end(leaving), name="engine-leaves")

    async def _end(self, leaving: _Leaving) -> None:
        engine = leaving.engine
        self.take_back(engine, False)
        try:
            async with asyncio.timeout(_PATIENCE):
                await self.balancer.until_idle(engine)
        except TimeoutError:
            self.take_back(engine, True)
        leaving.ending = True
        try:
            await engine.stop(WorkerStartFailed("its sampler was scaled down"))
        finally:
            del self._leaving[engine.replica]
        self._log.info("engine_left", engine=engine.key)

    # --- Starts -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all engines that do not run yet. Engines without a row get their places at one
        moment."""
        if self._placing is not None:
            return
        if all(each.row is not None and each.row.ends_as != "gone" for each in self.engines):
            for engine in self.engines:
                engine.start()
        else:
            self._placing = asyncio.create_task(self._place(), name="engines-placed")

    async def _place(self) -> None:
        """Ask for the places of all engines, and start them."""
        first = self.first
        try:
            requests = self.requests(len(self.engines))
            await first.supervisor.place(requests, holder=first.sampler)
        except Exception as error:  # noqa: BLE001 - our own fault must not hang the clients
            self._placing = None
            for engine in self.engines:
                if engine.state in ("idle", "failed"):
                    engine.fail(error)
        else:
            self._placing = None
            for engine in self.engines:
                engine.start()

    def _on_change(self, engine: SamplerEngine, error: TandemError | None) -> None:
        """Note that an engine serves, did not start, or is stopped."""
        if engine not in self.engines:
            return
        if error is not None:
            self._note_failed(error)
            return
        if engine.serves and any(each.serves for each in self.engines if each is not engine):
            if before := self._preparing.get(engine):
                before.cancel()
            task = asyncio.create_task(self._prepare(engine), name="engine-prepared")
            self._preparing[engine] = task
        self.balancer.assign_waiting()

    def _note_failed(self, error: TandemError) -> None:
        still = all(engine.state in ("idle", "failed", "stopped") for engine in self.engines)
        if still and self._placing is None:
            self.failed(error)
        self.balancer.assign_waiting()  # samples of a version that the others refused

    async def _prepare(self, engine: SamplerEngine) -> None:
        try:
            await self.prepare(engine)
        finally:
            if self._preparing.get(engine) is asyncio.current_task():
                del self._preparing[engine]
        self.spread()
        self.balancer.assign_waiting()

    # --- Ends ---------------------------------------------------------------------------------

    async def stop(self, error: TandemError) -> None:
        """End all engines, and return when nothing is left of them."""
        await self._cancel(*self._preparing.values(), self._placing)
        ending = [each.task for each in self._leaving.values() if each.ending and each.task]
        await self._cancel(*(e.task for e in self._leaving.values() if not e.ending))
        leaving = [each.engine for each in self._leaving.values() if not each.ending]
        await asyncio.gather(*(e.stop(error) for e in (*self.engines, *leaving)), *ending)

    async def abandon(self) -> None:
        """Cancel all tasks, and leave the engines to the next gateway."""
        leaving = [*self._leaving.values()]
        await self._cancel(
            *self._preparing.values(), self._placing, *(each.task for each in leaving)
        )
        await asyncio.gather(
            *(engine.abandon() for engine in (*self.engines, *(each.engine for each in leaving)))
        )

    async def _cancel(self, *tasks: asyncio.Task[None] | None) -> None:
        found = [task for task in tasks if task is not None]
        for task in found:
            task.cancel()
        await asyncio.gather(*found, return_exceptions=True)
