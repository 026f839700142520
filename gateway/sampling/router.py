"""The router finds samplers and bounds the number of waiting samples."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from gateway.checkpoints.base_models import BaseModelEntry, BaseModels
from gateway.checkpoints.pins import Pins
from gateway.metrics import Metrics
from gateway.owners.limits import Quotas, overloaded
from gateway.owners.sessions.registry import SessionRegistry
from gateway.owners.usage.meter import SampleMeter
from gateway.placement.asks import Asks, asks_of, sampled_on_cpu, settled_asks
from gateway.placement.leases import Leases
from gateway.placement.places import Places
from gateway.placement.room import PlaceRequest, engine_key
from gateway.sampling.engine import SamplerEngine
from gateway.sampling.sampler import SampleCall, Sampler, SamplerKey
from gateway.storage.futures.table import Future
from gateway.workers.fleet import Fleet
from gateway.workers.launchers.kubernetes.model_size import read_ahead
from gateway.workers.sampler_client import Tell
from tandem.errors import InvalidRequest, SampleCancelled, TandemError, UnknownSampler
from tandem.protocol.worker import WorkerHandle
from tandem.settings.gateway import GatewaySettings
from tandem.settings.workers import SamplerSettings
from tandem.v1 import sampler_pb2
from tandem.weights.model_config import head_size, read_json, why_unserved_by_cpu

MAX_WAITING_SAMPLES = 8192
_ADOPTION_PATIENCE = 2.0
_SMALLEST_RANK = 8
_LARGEST_RANK = 512


@dataclass(eq=False, kw_only=True)
class SamplerRouter:
    settings: GatewaySettings
    fleet: Fleet
    metrics: Metrics
    meter: SampleMeter
    pins: Pins
    models: BaseModels
    sessions: SessionRegistry
    limits: Quotas
    leases: Leases
    places: Places

    def __post_init__(self) -> None:
        self._samplers: dict[str, Sampler] = {}
        self._scaling: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._numbers = count()

    async def open(self) -> None:
        """Adopt an earlier gateway's engines and stop unneeded ones. Return once their loaded
        versions are known, so that the garbage collector spares them, without waiting long for a
        busy engine."""
        adoptions, ends = [], []
        for handle in self.fleet.take_engines():
            session, model = self.sessions.get(handle.session_id), self._model_of(handle)
            if model is not None:
                await read_ahead(model.path, self.settings)
            key = SamplerKey(handle.session_id, handle.model_name, handle.max_lora_rank)
            sampler = self._samplers.get(str(key))  # runs share it
            if sampler is None and (session is None or not session.sdk_version):
                ends.append(self.fleet.stop_left_worker(handle, "its session has no client"))
            elif model is None:
                ends.append(self.fleet.stop_left_worker(handle, "its model is not registered"))
            else:
                try:
                    sampler = sampler or self._add(key, model, user=handle.session_id)
                except InvalidRequest as error:  # the groups have changed
                    ends.append(self.fleet.stop_left_worker(handle, error.message))
                    continue
                engines = [e for e in sampler.engines if e.replica == handle.replica]
                if not engines or engines[0].state != "idle":
                    why = "its sampler has another engine" if engines else "its sampler has fewer"
                    ends.append(self.fleet.stop_left_worker(handle, why))
                elif (slot := self.places.adopt(engines[0])) is None:
                    ends.append(self.fleet.stop_left_worker(handle, "its place is gone"))
                else:
                    adoptions.append(engines[0].adopt(handle, slot))
        await asyncio.gather(*ends)
        self._go_on_scaling()
        if adoptions:
            await asyncio.wait(adoptions, timeout=_ADOPTION_PATIENCE)

    def _go_on_scaling(self) -> None:
        for key in [*self.places.scaled]:
            if sampler := self._samplers.get(key):
                sampler.start()
            self.places.drop_beyond(key)
            session_id = SamplerKey.parse(key).session_id
            if self.sessions.get(session_id) is None and not self.places.is_kept(key):
                self.places.forget_scaled(key)

    def all(self) -> list[Sampler]:
        return list(self._samplers.values())

    def by_key(self, key: str) -> Sampler | None:
        return self._samplers.get(key)

    def get(
        self,
        *,
        session_id: str,
        model_name: str,
        rank: int,
        all_weights: bool = False,
        kept: str = "",
    ) -> Sampler | None:
        """Return the session's sampler for adapters of `rank` (0: none): the sampler `kept`, else
        the one with the smallest rank. With `all_weights`, no other session may use it, because it
        loads other weights."""
        found = [
            sampler
            for sampler in self._samplers.values()
            if session_id in sampler.users
            and sampler.model.name == model_name
            and sampler.key.max_lora_rank >= rank
            and not (all_weights and len(sampler.users) > 1)
        ]
        return min(
            found, key=lambda each: (str(each.key) != kept, each.key.max_lora_rank), default=None
        )

    def key_for(self, *, session_id: str, model_name: str, rank: int) -> str:
        """Return the place key of the sampler for a new run of `rank` (0: all weights)."""
        sampler = self.get(
            session_id=session_id, model_name=model_name, rank=rank, all_weights=rank == 0
        )
        if sampler is not None:
            return str(sampler.key)
        return str(SamplerKey(session_id, model_name, self._largest_rank(rank)))

    def ensure(
        self,
        *,
        session_id: str,
        model: BaseModelEntry,
        rank: int,
        all_weights: bool = False,
        kept: str = "",
    ) -> Sampler:
        """Do as `get`, or create a sampler. Its engine starts on demand. Raises `LimitExceeded`,
        `SessionFinished`, and as `check_model` and `settled_asks`."""
        sampler = self.get(
            session_id=session_id,
            model_name=model.name,
            rank=rank,
            all_weights=all_weights,
            kept=kept,
        )
        if sampler is None:
            self.check_model(session_id, model.name)
            key = SamplerKey(session_id, model.name, self._largest_rank(rank))
            return self._add(key, model, user=session_id, limited=True)
        # A run may have asked for more.
        wanted = self.places.replicas_of(str(sampler.key), asked=len(sampler.engines))
        if wanted > len(sampler.engines):
            sampler.replicas.resize(wanted)
        return sampler

    def check_model(self, session_id: str, model_name: str) -> None:
        """Raise `InvalidRequest` if all the session's engines would be on a CPU and vLLM cannot
        compute the model's head size there. Raises `SessionFinished`, and as `asks_of`."""
        session = self.sessions.require(session_id)
        model = next((each for each in self.models.all() if each.name == model_name), None)
        if model is None:
            return
        asks = asks_of(
            None,
            session.user_metadata,
            model=model_name,
            settings=self.settings,
            groups=self.places.groups,
            admin=True,  # checked when the session was created
            trains=False,
        )
        if not sampled_on_cpu(asks, self.places.groups):
            return
        config: Mapping[str, object] = {}
        with suppress(OSError, ValueError):  # the load reports these errors
            config = read_json(self.settings.data_dir / model.path / "config.json")
        size = head_size(config)
        if size is not None and (reason := why_unserved_by_cpu(size)):
            raise InvalidRequest(f"the model {model_name} cannot be sampled here: {reason}")

    async def scale(self, sampler: Sampler, replicas: int, *, wait: float) -> None:
        """Set the number of a sampler's engines. New ones need devices within `wait` seconds, or
        nothing changes. Surplus engines end when idle. Raises `NoRoom`, `InvalidRequest` if no
        group has the devices, `LimitExceeded`, `StorageFailed`, and `UnknownSampler` if the sampler
        ends."""
        key, first = str(sampler.key), sampler.engine
        async with self._scaling[key]:
            had, back = len(sampler.engines), await sampler.replicas.settled()
            ask = None
            if replicas > had:
                self._check_engines(sampler.owner, adding=replicas - had)
                ask = self._ask(sampler.key, first.asks, owner=sampler.owner, replicas=replicas)
                self.places.check(ask)
                sampler.replicas.resize(min(replicas, back))
            try:
                await self.places.scale(key, replicas, ask, wait=wait)
            except BaseException:
                sampler.replicas.resize(had)
                raise
            if self._samplers.get(key) is not sampler:
                for number in range(had, replicas):
                    self.places.drop(engine_key(key, number))
                self.places.forget_scaled(key)
                raise UnknownSampler("the sampler ended with its session")
            sampler.replicas.resize(replicas)
            if replicas > had:
                sampler.start()

    def lend(self, key: str, session_id: str, model: BaseModelEntry) -> None:
        """Let a session use another session's sampler, even if that session has ended."""
        sampler = self._samplers.get(key)
        if sampler is None:
            sampler = self._add(SamplerKey.parse(key), model, user=session_id)
        sampler.users.add(session_id)

    def takes_adapters(self, key: str, *, rank: int) -> bool:
        """Return whether the sampler can load other sessions' adapters of `rank`. Its engines must
        have the base model's weights."""
        sampler, parsed = self._samplers.get(key), SamplerKey.parse(key)
        base = f"base/{parsed.model_name}"
        has_base = sampler is None or all(each.weights == base for each in sampler.engines)
        return parsed.max_lora_rank >= rank and has_base

    def submit(
        self,
        sampler: Sampler,
        *,
        future: Future,
        request: sampler_pb2.SampleRequest,
        tell: Tell | None = None,
    ) -> None:
        """Start a sample. `tell` receives its tokens as they are drawn. Raises `Overloaded` above a
        bound, after which the SDK retries later."""
        waiting = sampler.waiting
        if waiting >= MAX_WAITING_SAMPLES:
            self.limits.note_refusal("sampler_samples")
            raise overloaded(
                f"{waiting} samples wait at this sampler already, {MAX_WAITING_SAMPLES} at most",
                limit="sampler_samples",
                waiting=waiting,
                per_second=sampler.completions.per_second(),
            )
        reserved = self.limits.reserve(
            future.owner, (self.limits.samples, 1), (self.limits.held, request.ByteSize())
        )
        future.on_end(lambda _outcome: reserved.close())
        sample = SampleCall(future=future, request=request, tell=tell)
        sampler.add(sample)
        sampler.begin(sample)

    def cancel(self, request_id: str) -> None:
        """Cancel a sample here and in its engine. Ignore an unknown or ended one."""
        for sampler in self._samplers.values():
            if sample := sampler.samples.get(request_id):
                sample.future.resolve(SampleCancelled("the sample was cancelled by its client"))

    async def end_session(self, session_id: str, error: TandemError) -> None:
        """End the session's samples, and stop samplers without another session."""
        ended = []
        for key, sampler in [*self._samplers.items()]:
            if session_id in sampler.users:
                sampler.end_samples_of(session_id, error)
                sampler.users.discard(session_id)
                if not sampler.users:
                    ended.append(self._samplers.pop(key))
                    self.places.forget_scaled(key)
        await asyncio.gather(*(sampler.stop(error) for sampler in ended))

    async def close(self) -> None:
        """Cancel everything without an outcome, so that clients ask the next gateway."""
        await asyncio.gather(*(sampler.abandon() for sampler in self._samplers.values()))
        self._samplers.clear()

    def _add(
        self, key: SamplerKey, model: BaseModelEntry, *, user: str, limited: bool = False
    ) -> Sampler:
        """Create a sampler for its session, or for `user` if that has ended. If `limited`, raises
        `LimitExceeded` above the owner's number of engines."""
        session = self.sessions.get(key.session_id) or self.sessions.require(user)
        asks = settled_asks(
            None,
            session.user_metadata,
            model=model.name,
            model_path=model.path,
            settings=self.settings,
            groups=self.places.groups,
            admin=True,  # checked when the session was created
            max_lora_rank=key.max_lora_rank,
        )
        # A run of the session may have asked for more, or the sampler was scaled.
        replicas = self.places.replicas_of(str(key), asked=asks.replicas)
        if limited:
            self._check_engines(session.owner, adding=replicas)
            if replicas > 1:
                self.places.check(self._ask(key, asks, owner=session.owner, replicas=replicas))
        engine = SamplerEngine(
            key=engine_key(str(key), 0),
            session_id=key.session_id,
            owner=session.owner,
            model=model,
            max_lora_rank=key.max_lora_rank,
            settings=SamplerSettings.of(
                self.settings.sampler, operation_timeout=self.settings.operation_timeout
            ),
            sharing=self.settings.sharing,
            asks=asks,
            fleet=self.fleet,
            places=self.places,
            leases=self.leases,
            pins=self.pins,
        )
        sampler = self._samplers[str(key)] = Sampler(
            key=key,
            users={session.id, user},
            owner=session.owner,
            model=model,
            models=self.models,
            engine=engine,
            metrics=self.metrics,
            meter=self.meter,
            pins=self.pins,
        )
        sampler.replicas.resize(replicas)
        return sampler

    def _ask(self, key: SamplerKey, asks: Asks, *, owner: str, replicas: int) -> PlaceRequest:
        return PlaceRequest.of_engines(
            f"{key}#scaled-{next(self._numbers)}",
            owner=owner,
            session_id=key.session_id,
            engines={engine_key(str(key), number): asks for number in range(replicas)},
        )

    def _check_engines(self, owner: str, *, adding: int) -> None:
        theirs = (each for each in self._samplers.values() if each.owner == owner)
        used = sum(len(each.engines) for each in theirs)
        if adding > 0:
            self.limits.check("samplers", used=used, adding=adding)

    def _model_of(self, handle: WorkerHandle) -> BaseModelEntry | None:
        started = (handle.model_name, Path(handle.model_path))
        return next((m for m in self.models.all() if (m.name, Path(m.path)) == started), None)

    def _largest_rank(self, rank: int) -> int:
        """Round up to a power of two, as engines do in memory, so that runs of similar ranks share
        an engine."""
        if rank == 0:
            return 0
        largest = max(rank, _SMALLEST_RANK)
        return min(1 << (largest - 1).bit_length(), _LARGEST_RANK)
