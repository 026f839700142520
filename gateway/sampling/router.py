"""The router: which sampler serves what, and how many samples may wait."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.checkpoints.pins import Pins
from gateway.fair_queue import FairStarter
from gateway.futures.table import Future
from gateway.limits import Quotas, overloaded
from gateway.metrics import Metrics
from gateway.sampling.places import EnginePlaces
from gateway.sampling.sampler import Sample, Sampler
from gateway.sessions.registry import SessionRegistry
from gateway.usage.meter import SampleMeter
from gateway.workers.clients import Tell
from gateway.workers.fleet import Fleet
from tandem.errors import SampleCancelled, TandemError
from tandem.settings import GatewaySettings
from tandem.v1 import sampler_pb2

_SMALLEST_RANK = 8
_LARGEST_RANK = 512


@dataclass(eq=False, kw_only=True)
class SamplerRouter:
    """Finds or starts the sampler that can serve what is asked for, and bounds how many samples
    may wait."""

    settings: GatewaySettings
    fleet: Fleet
    metrics: Metrics
    meter: SampleMeter
    pins: Pins
    sessions: SessionRegistry
    limits: Quotas

    def __post_init__(self) -> None:
        self._starter = FairStarter()
        self._places = EnginePlaces(
            most=self.settings.max_engines,
            most_starting=self.settings.max_starting_engines,
            quantum=self.settings.engine_quantum,
        )
        self._samplers: dict[tuple[str, str, int], Sampler] = {}

    def all(self) -> list[Sampler]:
        return list(self._samplers.values())

    def get(self, *, session_id: str, model_name: str, rank: int) -> Sampler | None:
        """Return the session's sampler with the smallest rank that can serve adapters of `rank`
        (0: no adapters)."""
        found = [
            sampler
            for (session, model, largest), sampler in self._samplers.items()
            if (session, model) == (session_id, model_name) and largest >= rank
        ]
        return min(found, key=lambda sampler: sampler.max_lora_rank, default=None)

    def ensure(self, *, session_id: str, model: BaseModelEntry, rank: int) -> Sampler:
        """As `get`, but make a new sampler if there is none; its engine starts when it is needed.
        Raises `LimitExceeded` if the owner may not have another one, and `SessionFinished`."""
        sampler = self.get(session_id=session_id, model_name=model.name, rank=rank)
        if sampler is None:
            owner = self.sessions.require(session_id).owner
            used = self.sessions.count_of(owner, (s.session_id for s in self._samplers.values()))
            self.limits.check("samplers", used=used)
            largest = self._largest_rank(rank)
            sampler = self._samplers[session_id, model.name, largest] = Sampler(
                session_id=session_id,
                owner=owner,
                model=model,
                max_lora_rank=largest,
                settings=self.settings.sampler,
                fleet=self.fleet,
                places=self._places,
                metrics=self.metrics,
                meter=self.meter,
                pins=self.pins,
            )
        return sampler

    def submit(
        self,
        sampler: Sampler,
        *,
        future: Future,
        request: sampler_pb2.SampleRequest,
        tell: Tell | None = None,
    ) -> None:
        """Take a sample, which starts when it is its owner's turn; `tell` is given its tokens as
        they are drawn. Raises `Overloaded` if too many samples wait already, at this sampler, of
        this owner or in all: the SDK then sends it again later, and fewer at once."""
        waiting = sampler.waiting
        if waiting >= self.settings.max_waiting_samples:
            self.limits.note_refusal("sampler_samples")
            raise overloaded(
                f"{waiting} samples wait at this sampler already (TANDEM_MAX_WAITING_SAMPLES)",
                limit="sampler_samples",
                waiting=waiting,
                per_second=sampler.completions.per_second(),
            )
        reserved = self.limits.reserve(
            future.owner, (self.limits.samples, 1), (self.limits.held, request.ByteSize())
        )
        future.on_end(lambda _outcome: reserved.close())
        sample = Sample(future=future, request=request, tell=tell)
        sampler.add(sample)
        self._starter.put(future.owner, lambda: sampler.start(sample))

    def cancel(self, request_id: str) -> None:
        """Cancel a sample, here and in its engine; do nothing if it is unknown or has ended."""
        for sampler in self._samplers.values():
            if sample := sampler.samples.get(request_id):
                sample.future.resolve(SampleCancelled("the sample was cancelled by its client"))

    async def end_session(self, session_id: str, error: TandemError) -> None:
        """Stop the session's samplers."""
        keys = [key for key in self._samplers if key[0] == session_id]
        samplers = [self._samplers.pop(key) for key in keys]
        await asyncio.gather(*(sampler.stop(error) for sampler in samplers))

    async def close(self) -> None:
        """Cancel everything without an outcome: clients ask the next gateway."""
        self._starter.clear()
        await asyncio.gather(*(sampler.abandon() for sampler in self._samplers.values()))
        self._samplers.clear()

    def _largest_rank(self, rank: int) -> int:
        """Round up to a power of two, as engines reserve memory anyway, so that runs of similar
        ranks share an engine."""
        if rank == 0:
            return 0
        largest = max(rank, self.settings.sampler.max_lora_rank, _SMALLEST_RANK)
        return min(1 << (largest - 1).bit_length(), _LARGEST_RANK)
