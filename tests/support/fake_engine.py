"""A scheduler that a test runs turn by turn, with a fake engine and a fake loader."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from sampler_service.engine import (
    EngineFacts,
    EngineRequest,
    EngineResult,
    PromptScores,
    SampledTokens,
    StepOutput,
)
from sampler_service.metrics import SamplerMetrics
from sampler_service.scheduler import Sampled, SampleJob, Scheduler
from sampler_service.weights.adapters import AdapterCache
from sampler_service.weights.loader import LoadOutcome, WeightVersion
from tandem.errors import LoadFailed, SequenceTooLong

BASE, NEW, OTHER = (
    WeightVersion(name=name, path=Path(name)) for name in ("base/m", "run/v1", "run/v2")
)


@dataclass
class FakeEngine:
    """Ends each request after `max_tokens` steps and records its calls. A step computes the first
    `room` of them.

    `together` holds the adapters of each step; `computed` the logprobs of each adapter's canary,
    zeros by default.
    """

    admitted: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    adapters: dict[str, Path] = field(default_factory=dict)
    together: set[frozenset[str | None]] = field(default_factory=set)
    computed: dict[str, list[float]] = field(default_factory=dict)
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    room: int = 1000
    broken: bool = False
    facts: EngineFacts = field(
        default=EngineFacts(
            vocabulary=9, max_length=9, dtype="float32", device="cpu", name="fake", end_tokens=()
        )
    )

    @property
    def running(self) -> int:
        return len(self.left)

    def add(self, request: EngineRequest) -> None:
        if request.max_tokens > 100:
            raise SequenceTooLong("too long for the engine")
        assert request.adapter is None or request.adapter in self.adapters
        self.requests[request.id] = request
        self.admitted.append(request.id)
        self.left[request.id] = request.max_tokens

    def step(self) -> StepOutput:
        if self.broken:
            raise RuntimeError("out of order")
        self.together.add(frozenset(self.requests[id_].adapter for id_ in self.left))
        computed = list(self.left)[: self.room]
        self.left |= {id_: self.left[id_] - 1 for id_ in computed}
        done = [id_ for id_, left in self.left.items() if left == 0]
        for id_ in done:
            del self.left[id_]
        sample = SampledTokens(np.zeros(1, np.int32), np.zeros(1, np.float32), stopped=False)
        begun = [id_ for id_ in computed if id_ in self.left and id_ not in self.begun]
        self.begun.update(begun)
        return StepOutput(
            [
                EngineResult(id=id_, samples=(sample,), prompt=self.scores(self.requests[id_]))
                for id_ in done
            ],
            begun=begun,
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

    def abort(self, ids: list[str]) -> None:
        for id_ in ids:
            del self.left[id_]
        self.aborted.extend(ids)


@dataclass
class FakeLoader:
    """Records loads. `errors` are raised, one by one, by the loads of a version."""

    engine: FakeEngine
    loads: list[str] = field(default_factory=list)
    errors: dict[str, list[LoadFailed]] = field(default_factory=dict)

    def load(self, version: WeightVersion) -> LoadOutcome:
        assert not self.engine.left, "weights were changed under running requests"
        self.loads.append(version.name)
        self.engine.adapters.clear()
        if self.errors.get(version.name):
            raise self.errors[version.name].pop(0)
        return LoadOutcome(version=version, bytes=7, seconds=0.1, canary_difference=0.0)


class Bench:
    """A scheduler with its clock, run in the test's own thread."""

    def __init__(
        self,
        *,
        patience: float = 2.0,
        timeout: float = 1800.0,
        base: Path = Path(),
        rank: int = 0,
        room: int = 2,
    ) -> None:
        """`rank` and `room` limit the adapters of the model in `base`."""
        self.engine = FakeEngine()
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
        )

    def ask(
        self,
        version: WeightVersion,
        id_: str,
        *,
        steps: int = 1,
        session: str = "s",
        seq_id: int | None = None,
    ) -> Future[Sampled]:
        request = EngineRequest(id=id_, prompt=[1], num_samples=1, max_tokens=steps)
        seq_id = next(self.numbers) if seq_id is None else seq_id
        self.now += 0.001  # nothing arrives at the same instant
        return self.scheduler.submit(
            SampleJob(request=request, version=version, session_id=session, seq_id=seq_id)
        )

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.turn()

    def settle(self) -> None:
        status = self.scheduler.status
        while status.running or status.waiting:
            self.scheduler.turn()
            status = self.scheduler.status
