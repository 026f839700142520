"""Routes samples to engines, and bounds how many may wait.

A session has one engine for each base model and largest rank of adapters. An engine that can
serve what is asked for is reused: engines are slow to start, and each takes a share of the
device.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.checkpoints.pins import Pins
from gateway.checkpoints.versions import WeightVersion
from gateway.fair_queue import FairStarter
from gateway.futures.table import Future
from gateway.limits.ledger import overloaded
from gateway.limits.quotas import Quotas
from gateway.metrics import Metrics
from gateway.sampling.sampler import Sample, Sampler
from gateway.sampling.sessions import SamplingSession, SamplingSessionRegistry
from gateway.sessions.registry import SessionRegistry
from gateway.usage.samples import EngineMeter, RecentSamples
from gateway.workers.clients import Tell
from gateway.workers.fleet import Fleet
from tandem.errors import SessionFinished, TandemError
from tandem.settings import GatewaySettings
from tandem.v1 import sampler_pb2

_SMALLEST_RANK = 8
_LARGEST_RANK = 512


class SamplerRouter:
    def __init__(
        self,
        *,
        settings: GatewaySettings,
        fleet: Fleet,
        metrics: Metrics,
        samples: RecentSamples,
        sampling: SamplingSessionRegistry,
        pins: Pins,
        sessions: SessionRegistry,
        limits: Quotas,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._metrics = metrics
        self._samples = samples
        self._sampling = sampling
        self._pins = pins
        self._sessions = sessions
        self._limits = limits
        self._starter = FairStarter()
        self._samplers: dict[tuple[str, str, int], Sampler] = {}

    def all(self) -> list[Sampler]:
        return list(self._samplers.values())

    def get(self, *, session_id: str, model_name: str, rank: int) -> Sampler | None:
        """Return the session's sampler with the smallest rank that can serve adapters of `rank`
        (0: no adapters)."""
        found = [
            (largest, sampler)
            for (session, model, largest), sampler in self._samplers.items()
            if (session, model) == (session_id, model_name) and largest >= rank
        ]
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def ensure(self, *, session_id: str, model: BaseModelEntry, rank: int) -> Sampler:
        """As `get`, but start a new sampler if there is none. Raises `LimitExceeded` if the owner
        may not have another one, and `SessionFinished`."""
        sampler = self.get(session_id=session_id, model_name=model.name, rank=rank)
        if sampler is None:
            owner = self._sessions.require(session_id).owner
            used = self._sessions.count_of(owner, (s.session_id for s in self._samplers.values()))
            self._limits.check("samplers", used=used)
            largest = self._largest_rank(rank)
            sampler = self._samplers[session_id, model.name, largest] = Sampler(
                session_id=session_id,
                model=model,
                fleet=self._fleet,
                metrics=self._metrics,
                meter=EngineMeter(samples=self._samples, base_model=model.name),
                pins=self._pins,
                settings=self._settings.sampler,
                max_lora_rank=largest,
            )
        return sampler

    async def serve_published(
        self,
        version: WeightVersion,
        *,
        session_id: str,
        model: BaseModelEntry,
        rank: int,
        number: int,
        kind: Literal["snapshot", "inflight"],
    ) -> SamplingSession:
        """Return a new sampling session of a version that a run has just published, when the
        engine serves it. Raises `LoadFailed` and the like, and as `ensure`."""
        sampler = self.ensure(session_id=session_id, model=model, rank=rank)
        await sampler.load(version)
        return await self._sampling.create_ephemeral(
            session_id=session_id, number=number, kind=kind, version=version
        )

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
        if waiting >= self._settings.max_waiting_samples:
            self._limits.note_refusal("sampler_samples")
            raise overloaded(
                f"{waiting} samples wait at this sampler already (TANDEM_MAX_WAITING_SAMPLES)",
                limit="sampler_samples",
                waiting=waiting,
                per_second=sampler.rate,
            )
        reserved = self._limits.reserve_sample(future.owner, size=request.ByteSize())
        future.on_end(lambda _outcome: reserved.close())
        sample = Sample(future=future, request=request, tell=tell)
        sampler.add(sample)
        self._starter.put(future.owner, lambda: sampler.start(sample))

    def cancel(self, request_id: str) -> bool:
        """Cancel a sample; return False if it is unknown or has ended."""
        return any(sampler.cancel(request_id) for sampler in self._samplers.values())

    async def end_session(self, session_id: str, error: TandemError | None = None) -> None:
        """Stop the session's samplers."""
        keys = [key for key in self._samplers if key[0] == session_id]
        samplers = [self._samplers.pop(key) for key in keys]
        reason = error or SessionFinished(f"session {session_id} has ended")
        await asyncio.gather(*(sampler.stop(reason) for sampler in samplers))

    async def close(self) -> None:
        """Cancel everything without an outcome: clients ask the next gateway."""
        self._starter.clear()
        samplers, self._samplers = list(self._samplers.values()), {}
        await asyncio.gather(*(sampler.abandon() for sampler in samplers))

    def _largest_rank(self, rank: int) -> int:
        """Round up to a power of two, as engines reserve memory anyway, so that runs of similar
        ranks share an engine."""
        if rank == 0:
            return 0
        largest = max(rank, self._settings.sampler.max_lora_rank, _SMALLEST_RANK)
        return min(1 << (largest - 1).bit_length(), _LARGEST_RANK)
