"""The samplers of all sessions: which engine serves what, and how many samples may wait.

A session has one engine for each base model and largest rank of adapters. What can be served
by an engine that is there gets no engine of its own: engines are slow to start, and each takes
a share of the device.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.checkpoints.pins import Pins
from gateway.checkpoints.versions import WeightVersion
from gateway.fair_queue import FairStarter
from gateway.futures.table import Future
from gateway.limits.ledger import wait_for_room
from gateway.limits.quotas import Quotas, give_back
from gateway.metrics import Metrics
from gateway.sampling.sampler import Sampler
from gateway.sampling.sessions import SamplingSession, SamplingSessionRegistry
from gateway.sessions.registry import SessionRegistry
from gateway.usage.samples import EngineMeter, RecentSamples
from gateway.workers.clients import Tell
from gateway.workers.fleet import Fleet
from tandem.errors import Overloaded, SessionFinished, TandemError
from tandem.settings import GatewaySettings
from tandem.v1 import sampler_pb2

_SMALLEST_RANK = 8
_LARGEST_RANK = 512


class SamplerRouter:
    """All samplers of this gateway."""

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
        """The session's sampler that serves adapters of this rank (0: none are needed) with
        the least room to spare."""
        found = [
            (largest, sampler)
            for (session, model, largest), sampler in self._samplers.items()
            if (session, model) == (session_id, model_name) and largest >= rank
        ]
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def ensure(self, *, session_id: str, model: BaseModelEntry, rank: int) -> Sampler:
        """As `get`; where there is none, the engine of a new one begins to start. Raises
        `LimitExceeded` where that is one too many of its owner, and `SessionFinished`."""
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
                operation_timeout=self._settings.sampler.operation_timeout,
                max_lora_rank=largest,
                max_adapters=self._settings.sampler.max_adapters,
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
        version: WeightVersion,
        request: sampler_pb2.SampleRequest,
        tell: Tell | None = None,
    ) -> None:
        """Takes a sample, which is sent when it is its owner's turn; `tell` is given its tokens
        as they are drawn. Raises `Overloaded` when
        too many wait already, at this sampler, of this owner or in all: the SDK then comes back
        a little later with fewer at once."""
        waiting = sampler.waiting
        if waiting >= self._settings.max_waiting_samples:
            self._limits.note_refusal("sampler_samples")
            seconds = wait_for_room(sampler.rate, waiting=waiting)
            raise Overloaded(
                f"{waiting} samples wait at this sampler already "
                f"(TANDEM_MAX_WAITING_SAMPLES); ask again in {seconds:g} s",
                limit="sampler_samples",
                retry_after=seconds,
                position=waiting + 1,
            )
        leases = self._limits.take_sample(future.owner, size=request.ByteSize())
        future.on_end(lambda _outcome: give_back(leases))
        start = sampler.submit(future=future, version=version, request=request, tell=tell)
        self._starter.put(future.owner, start)

    def cancel(self, request_id: str) -> bool:
        """Gives up a sample. False: it is not here, or has ended."""
        return any(sampler.cancel(request_id) for sampler in self._samplers.values())

    async def end_session(self, session_id: str, error: TandemError | None = None) -> None:
        """Stops the session's samplers."""
        keys = [key for key in self._samplers if key[0] == session_id]
        samplers = [self._samplers.pop(key) for key in keys]
        reason = error or SessionFinished(f"session {session_id} has ended")
        await asyncio.gather(*(sampler.stop(reason) for sampler in samplers))

    async def close(self) -> None:
        """The gateway stops: what waits is told nothing, and asks the next one."""
        self._starter.clear()
        samplers, self._samplers = list(self._samplers.values()), {}
        await asyncio.gather(*(sampler.abandon() for sampler in samplers))

    def _largest_rank(self, rank: int) -> int:
        """Rounded up to a power of two, as engines reserve room anyway, so that runs of like
        ranks share one."""
        if rank == 0:
            return 0
        largest = max(rank, self._settings.sampler.max_lora_rank, _SMALLEST_RANK)
        return min(1 << (largest - 1).bit_length(), _LARGEST_RANK)
