"""What the scheduler is given to do, and what it answers with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from sampler_service.engine import EngineDelta, EngineRequest, EngineResult
from sampler_service.reload import LoadOutcome, Version
from sampler_service.states import State
from tandem.errors import TandemError


@dataclass(frozen=True)
class SampleJob:
    """A request for a version, with its place among those that wait.

    `listener` hears, in the engine's thread, what a streamed request got in each step, and must
    return at once. The last it hears of a request is before the answer.
    """

    request: EngineRequest
    version: Version
    session_id: str
    seq_id: int
    listener: Callable[[Sequence[EngineDelta]], None] | None = None


@dataclass(frozen=True)
class Sampled:
    """What a request was answered with: the version is the one that was in the engine.
    `seconds` went by from its admission into the engine."""

    result: EngineResult
    version: Version
    seconds: float


@dataclass(frozen=True)
class Status:
    state: State
    version: Version
    running: int
    waiting: int
    adapters: tuple[str, ...] = ()


@dataclass(eq=False)
class Waiter:
    """Work that waits or runs. `job` is None for an explicit load. `weights` are the version
    that must be loaded for it: its own, or the base model's for an adapter."""

    version: Version
    weights: Version
    arrived: float
    job: SampleJob | None = None
    admitted: float = 0.0
    sampled: Future[Sampled] = field(default_factory=Future)
    loaded: Future[LoadOutcome] = field(default_factory=Future)

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for it any more: its caller went, or ran out of time."""
        return self._future.cancelled()

    def fail(self, error: TandemError) -> None:
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(error)

    @property
    def _future(self) -> Future[Sampled] | Future[LoadOutcome]:
        return self.sampled if self.job is not None else self.loaded

    @property
    def order(self) -> tuple[str, int, float]:
        assert self.job is not None
        return (self.job.session_id, self.job.seq_id, self.arrived)
