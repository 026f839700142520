"""A scheduler that a test runs turn by turn, with a fake engine and a fake loader."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from sampler_service.engine import (
    EngineFacts,
    EngineMemory,
    EngineRequest,
    EngineResult,
    PromptScores,
    SampledTokens,
    SleepLevel,
    StepOutput,
    WeightsTouched,
)
from sampler_service.metrics import SamplerMetrics
from sampler_service.scheduler import Scheduler
from sampler_service.weights.adapters import AdapterCache
from sampler_service.weights.loader import LoadableVersion, Verified
from sampler_service.work import Sampled, SampleJob, Updates
from tandem.errors import SequenceTooLong
from tandem.v1 import common_pb2

BASE, NEW, OTHER = (
    LoadableVersion(name=name, path=Path(name)) for name in ("base/m", "run/v1", "run/v2")
)


@dataclass
class FakeEngine:
    """Ends each request after `max_tokens` steps and records its calls.

    A step computes the first `room` requests. `drawn` lists, per request, the adapter or weights
    directory of each token. `together` holds the adapters of each step. `computed` holds each
    adapter's canary logprobs, zeros by default. `weights` is the loaded directory, or empty.
    Sleeping weights or caches refuse calls."""

    weights: str = BASE.path.name
    weights_asleep: bool = False
    cache_asleep: bool = False
    cache_empty: bool = True

    admitted: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    adapters: dict[str, Path] = field(default_factory=dict)
    together: set[frozenset[str | None]] = field(default_factory=set)
    computed: dict[str, list[float]] = field(default_factory=dict)
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    drawn: dict[str, list[str]] = field(default_factory=dict)
    carried_at: dict[str, tuple[int, ...]] = field(default_factory=dict)
    aside: dict[str, int] | None = None
    room: int = 1000
    broken: bool = False
    facts: EngineFacts = field(
        default=EngineFacts(
            vocabulary=9,
            max_length=9,
            model_length=9,
            dtype="float32",
            device="cpu",
            name="fake",
            end_tokens=(),
        )
    )

    @property
    def running(self) -> int:
        return len(self.left)

    def add(self, request: EngineRequest) -> None:
        if self.broken:
            raise RuntimeError("out of order")
        if request.max_tokens > 100:
            raise SequenceTooLong("too long for the engine")
        assert request.adapter is None or request.adapter in self.adapters
        assert self.weights and not self.weights_asleep and not self.cache_asleep
        assert self.cache_empty, "the KV cache still refers to what was lost in a sleep"
        self.requests[request.id] = request
        self.admitted.append(request.id)
        self.left[request.id] = max(1, request.max_tokens)

    def step(self) -> StepOutput:
        if self.broken:
            raise RuntimeError("out of order")
        self.together.add(frozenset(self.requests[id_].adapter for id_ in self.left))
        computed = list(self.left)[: self.room]
        self.left |= {id_: self.left[id_] - 1 for id_ in computed}
        for id_ in computed:
            self.drawn.setdefault(id_, []).append(self.requests[id_].adapter or self.weights)
        done = [id_ for id_, left in self.left.items() if left == 0]
        for id_ in done:
            del self.left[id_]
        begun = [id_ for id_ in computed if id_ in self.left and id_ not in self.begun]
        self.begun.update(begun)
        return StepOutput(
            [
                EngineResult(
                    id=id_, samples=(self.sample(id_),), prompt=self.scores(self.requests[id_])
                )
                for id_ in done
            ],
            begun=begun,
        )

    def sample(self, id_: str) -> SampledTokens:
        length = self.requests[id_].max_tokens
        return SampledTokens(
            np.zeros(length, np.int32),
            np.zeros(length, np.float32),
            stopped=False,
            carried_at=self.carried_at.get(id_, ()),
        )

    def scores(self, request: EngineRequest) -> PromptScores | None:
        if request.scoring is None:
            return None
        values = self.computed.get(request.adapter or "", [0.0] * (len(request.prompt) - 1))
        return PromptScores(logprobs=np.array([np.nan, *values], np.float32))

    def add_adapter(self, name: str, directory: Path) -> None:
        assert len(self.adapters) < self.facts.max_adapters
        self.adapters[name] = directory

    def remove_adapter(self, name: str) -> None:
        assert name not in {self.requests[id_].adapter for id_ in self.left}
        del self.adapters[name]

    def load(self, directory: Path) -> frozenset[str]:
        assert not self.left, "weights were changed under running requests"
        assert not self.weights_asleep
        self.weights = directory.name
        self.adapters.clear()
        return frozenset()

    def load_handoff(self, handoff: common_pb2.Handoff) -> frozenset[str]:
        raise AssertionError("nobody hands weights over to a fake engine")

    def settle(self) -> StepOutput:
        return StepOutput()

    def pause(self) -> None:
        self.aside, self.left = self.left, {}

    def resume(self) -> None:
        assert self.aside is not None and self.weights
        self.aside, self.left = None, self.left | self.aside

    def carry_over(self, ids: list[str], *, adapter: str | None = None) -> None:
        assert adapter is None or adapter in self.adapters
        for id_ in ids:
            request, left = self.requests[id_], (self.aside or self.left)[id_]
            self.requests[id_] = replace(request, adapter=adapter)
            self.carried_at[id_] = (*self.carried_at.get(id_, ()), request.max_tokens - left)

    def sleep(self, level: SleepLevel) -> None:
        assert not self.left, "running requests were put to sleep"
        assert not self.weights_asleep and not self.cache_asleep
        self.weights_asleep = self.cache_asleep = True
        self.cache_empty = False
        if level is SleepLevel.DROP_WEIGHTS:
            self.weights = ""
            self.adapters.clear()

    def wake_weights(self) -> None:
        assert self.weights_asleep
        self.weights_asleep = False

    def wake_cache(self) -> None:
        assert self.cache_asleep and not self.weights_asleep
        self.cache_asleep = False

    def reset_prefix_cache(self) -> bool:
        assert not self.left and not self.cache_asleep
        self.cache_empty = True
        return True

    def memory(self) -> EngineMemory:
        return EngineMemory(device=0 if self.cache_asleep else 100, host=0)

    def finish(self, ids: list[str]) -> StepOutput:
        assert self.aside is None
        drawn = [id_ for id_ in ids if self.drawn.get(id_)]
        for id_ in drawn:
            tokens = self.requests[id_].max_tokens - self.left.pop(id_)
            self.requests[id_] = replace(self.requests[id_], max_tokens=tokens)
        return StepOutput([EngineResult(id=id_, samples=(self.sample(id_),)) for id_ in drawn])

    def abort(self, ids: list[str]) -> None:
        for id_ in ids:
            del self.left[id_]
        self.aborted.extend(ids)


@dataclass
class FakeLoader:
    """Records reads and loads.

    `errors` are raised one by one by a version's reading, or by its load if they are
    `WeightsTouched`."""

    engine: FakeEngine
    reads: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    errors: dict[str, list[Exception]] = field(default_factory=dict)

    def verify(self, version: LoadableVersion, go_on: Callable[[], None]) -> Verified:
        go_on()
        self.reads.append(version.name)
        errors = self.errors.get(version.name, [])
        if errors and not isinstance(errors[0], WeightsTouched):
            raise errors.pop(0)
        return Verified(version, bytes=7)

    def place(self, verified: Verified) -> None:
        version = verified.version
        self.loads.append(version.name)
        self.engine.load(version.path)
        errors = self.errors.get(version.name, [])
        if errors and isinstance(errors[0], WeightsTouched):
            self.engine.weights = ""
            raise errors.pop(0)

    def confirm(self, verified: Verified) -> float:
        assert self.engine.reset_prefix_cache()
        assert self.engine.weights == verified.version.path.name
        return 0.0


class LaterReads:
    def __init__(self, *, at_once: bool = False) -> None:
        self.begun: list[Callable[[], None]] = []
        self.at_once = at_once

    def __call__(self, read: Callable[[], None]) -> None:
        self.begun.append(read)
        if self.at_once:
            self.finish()

    def finish(self) -> None:
        """Carry out the begun readings."""
        begun, self.begun = self.begun, []
        for read in begun:
            read()


class Bench:
    def __init__(
        self,
        *,
        patience: float = 2.0,
        timeout: float = 1800.0,
        base: Path = Path(),
        rank: int = 0,
        room: int = 2,
        engine: FakeEngine | None = None,
        start_reading: Callable[[Callable[[], None]], None] = lambda read: read(),
    ) -> None:
        """`rank` and `room` limit the adapters of the model in `base`."""
        self.engine = engine or FakeEngine()
        self.engine.facts = replace(
            self.engine.facts, max_lora_rank=rank, max_adapters=room if rank else 0
        )
        self.loader = FakeLoader(self.engine)
        self.now = 0.0
        self.fatal: list[Exception] = []
        self.numbers = itertools.count()
        self.adapters = AdapterCache(self.engine, base=base, tolerance=1e-4, clock=lambda: self.now)
        self.scheduler = Scheduler(
            self.engine,
            self.loader,
            self.adapters,
            base=BASE,
            patience=patience,
            timeout=timeout,
            metrics=SamplerMetrics(CollectorRegistry()),
            clock=lambda: self.now,
            on_fatal=self.fatal.append,
            start_reading=start_reading,
        )

    def ask(
        self,
        version: LoadableVersion,
        id_: str,
        *,
        steps: int = 1,
        session: str = "s",
        seq_id: int | None = None,
        in_flight: bool = False,
        updates: Updates = Updates.DEFAULT,
    ) -> Future[Sampled]:
        request = EngineRequest(id=id_, prompt=[1], num_samples=1, max_tokens=steps)
        seq_id = next(self.numbers) if seq_id is None else seq_id
        self.now += 0.001  # no two arrivals at one instant
        return self.scheduler.submit(
            SampleJob(
                request=request,
                version=version,
                session_id=session,
                seq_id=seq_id,
                in_flight=in_flight or updates is not Updates.DEFAULT,
                updates=updates,
            )
        )

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.turn()

    def settle(self) -> None:
        status = self.scheduler.status
        while status.running or status.waiting:
            self.scheduler.turn()
            status = self.scheduler.status
