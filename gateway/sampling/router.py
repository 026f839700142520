"""The router finds and makes samplers, and bounds the number of waiting samples."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from gateway.checkpoints.base_models import BaseModelEntry, BaseModels
from gateway.checkpoints.pins import Pins
from gateway.metrics import Metrics
from gateway.owners.limits import Quotas, overloaded
from gateway.owners.sessions.registry import Session, SessionRegistry
from gateway.owners.usage.meter import SampleMeter
from gateway.sampling.engine import SamplerEngine
from gateway.sampling.replicas import ReplicaRange
from gateway.sampling.sampler import Check, SampleCall, Sampler, SamplerKey
from gateway.storage.futures.table import Future
from gateway.workers.engine_adapter import EngineAdapter
from gateway.workers.model_sizes import read_ahead
from gateway.workers.processes import Processes
from gateway.workers.request_maker import RequestMaker, engine_key
from gateway.workers.requests import WorkerRequest
from gateway.workers.run_options import RunOptions, options_of, sampled_on_cpu
from gateway.workers.sampler_client import Tell
from gateway.workers.standing import engines_of
from gateway.workers.supervisor import Supervisor
from gateway.workers.table import WorkerRow
from tandem.errors import InvalidRequest, SampleCancelled, TandemError, UnknownSampler
from tandem.settings.gateway import GatewaySettings
from tandem.settings.sharing import Sharing
from tandem.settings.workers import SamplerSettings
from tandem.v1 import sampler_pb2
from tandem.weights.model_config import head_size, read_json, why_unserved_by_cpu

MAX_WAITING_SAMPLES = 8192
"""The most unfinished samples of one owner at one sampler."""
_TAKE_UP_PATIENCE = 2.0
_SMALLEST_RANK = 8
_LARGEST_RANK = 512


@dataclass(eq=False, kw_only=True)
class SamplerRouter:
    settings: GatewaySettings
    supervisor: Supervisor
    adapter: EngineAdapter
    processes: Processes
    requests: RequestMaker
    metrics: Metrics
    meter: SampleMeter
    pins: Pins
    models: BaseModels
    sessions: SessionRegistry
    limits: Quotas

    def __post_init__(self) -> None:
        self._samplers: dict[str, Sampler] = {}
        self._scaling: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._kept: set[str] = set()
        """Keys of the samplers whose engines a trainer keeps."""
        self._ranges: dict[str, ReplicaRange] = {}
        """The ranges of runs, by key."""
        self._apart: dict[str, Sharing | None] = {}
        """The asked sharing of the runs that share no engine with other runs, by sampler."""

    async def take_up_engines(self, sampled: Sequence[tuple[str, str, int]]) -> None:
        """Take up an earlier gateway's engines, each for a sampler of its session. Return once
        their loaded versions are known, so that the garbage collector spares them, without waiting
        long for a busy engine.

        `sampled` has the session, base model and rank of each sampling session that may share a
        sampler. They share the engines again. An engine whose session has ended goes on for
        them."""
        found: set[asyncio.Task[None]] = set()
        sampled = [each for each in sampled if self._has_client(each[0])]
        rows = [row for row in self.supervisor.roster.rows.values() if row.kind == "engine"]
        # A session with an engine needs none of an ended session.
        for row in sorted(rows, key=lambda row: not self._has_client(row.request.session)):
            if row.ends_as == "gone":
                continue
            if (sampler := await self._sampler_of(row, sampled)) is None:
                continue
            engines = [each for each in sampler.engines if each.key == row.key]
            found.update(engine.take_up() for engine in engines if row.has_process)
        for key, sampler in self._samplers.items():
            wanted = [engine.key for engine in sampler.engines]
            for each in self.supervisor.held_by(key):
                if each not in wanted:  # smaller numbers stay
                    self.supervisor.let_go(each, holder=key)
            if len(wanted) > 1:
                sampler.start()
        if found:
            await asyncio.wait(found, timeout=_TAKE_UP_PATIENCE)
        models = {model.name: model for model in self.models.all()}
        for session_id, name, rank in sampled:
            has = self.get(session_id=session_id, model_name=name, rank=rank) is not None
            if not has and name in models:
                with suppress(InvalidRequest):  # the groups may have changed
                    self._join(self.sessions.require(session_id), models[name], rank=rank)

    async def _sampler_of(
        self, row: WorkerRow, sampled: Sequence[tuple[str, str, int]]
    ) -> Sampler | None:
        """Return the sampler of an engine's row, made anew if a session still needs it."""
        key = SamplerKey.parse(row.request.sampler)
        model = next((m for m in self.models.all() if m.name == key.model_name), None)
        sampler = self._samplers.get(str(key))  # runs share it
        if model is None or Path(model.path) != Path(row.request.model):
            return None
        await read_ahead(model.path, self.settings)
        if sampler is not None:
            return sampler
        with suppress(InvalidRequest):  # the groups may have changed
            if self._has_client(key.session_id):
                return self._add(key, model, user=key.session_id)
            for user, name, rank in sampled:
                fits = name == key.model_name and rank <= key.max_lora_rank
                needs_none = self.get(session_id=user, model_name=name, rank=rank) is not None
                if not fits or needs_none or str(key) in self._kept:
                    continue
                if self._would_ask_for(row, self.sessions.require(user), model):
                    return self._add(key, model, user=user)
        return None

    def _has_client(self, session_id: str) -> bool:
        session = self.sessions.get(session_id)
        return session is not None and session.sdk_version != ""

    def _would_ask_for(self, row: WorkerRow, session: Session, model: BaseModelEntry) -> bool:
        """Return whether a session may share the engine of a row, and would ask for an equal
        one."""
        key = SamplerKey.parse(row.request.sampler)
        options = self._options_of(session, model.name)
        (made,) = self.engine_requests(str(key), options, owner=row.owner, model=model, replicas=1)
        made = replace(made, key=row.key, together=row.request.together)
        return self._may_share(session, row.owner, options) and made == row.request

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
        kept: str | None = None,
    ) -> Sampler | None:
        """Return the session's sampler for adapters of `rank` (0: none), the one with the smallest
        rank. With `all_weights`, no other session may use it, because it loads other weights.

        For a run, `kept` is the key of the sampler that its trainer keeps, or "". The run uses it,
        unless other sessions use it with `all_weights`. A run uses no sampler that its session
        joined only to sample."""
        if kept:
            sampler = self._samplers.get(kept)
            if sampler is None or not (all_weights or session_id in sampler.users):
                return None
        found = [
            sampler
            for key, sampler in self._samplers.items()
            if session_id in sampler.users
            and sampler.model.name == model_name
            and sampler.key.max_lora_rank >= rank
            and not (all_weights and len(sampler.users) > 1)
            and (kept in (None, key) or sampler.key.session_id == session_id or key in self._kept)
            and (kept in (None, key) or key not in self._apart)
        ]
        return min(
            found, key=lambda each: (str(each.key) != kept, each.key.max_lora_rank), default=None
        )

    def key_for(self, *, session_id: str, model_name: str, rank: int, apart: bool = False) -> str:
        """Return the key of the sampler for a new run of `rank` (0: all weights). A run `apart`
        has one of its own."""
        sampler = self.get(
            session_id=session_id, model_name=model_name, rank=rank, all_weights=rank == 0, kept=""
        )
        if sampler is not None and not apart:
            return str(sampler.key)
        taken = self._kept if apart else self._apart
        return str(self._free_key(session_id, model_name, rank, taken=taken))

    def ensure(
        self,
        *,
        session_id: str,
        model: BaseModelEntry,
        rank: int,
        all_weights: bool = False,
        kept: str | None = None,
    ) -> Sampler:
        """Do as `get`, or else join another session's sampler, or else create one. Its engine
        starts on demand. Full weights join none, and a run only the one that its trainer keeps.
        Raises `LimitExceeded`, `SessionFinished`, and as `check_model`."""
        sampler = self.get(
            session_id=session_id,
            model_name=model.name,
            rank=rank,
            all_weights=all_weights,
            kept=kept,
        )
        if sampler is None:
            self.check_model(session_id, model.name)
            if not all_weights and kept is None:
                session = self.sessions.require(session_id)
                sampler = self._join(session, model, rank=rank)
            elif not all_weights and kept in self._samplers:
                sampler = self._samplers[kept]
                sampler.users.add(session_id)
            taken = () if kept is None else self._apart
            key = self._free_key(session_id, model.name, rank, taken=taken)
            if kept and kept not in self._samplers:
                key = SamplerKey.parse(kept)
            return sampler or self._add(key, model, user=session_id, limited=True)
        # A run may have asked for more.
        wanted = self._replicas_of(str(sampler.key), asked=len(sampler.engines))
        if wanted > len(sampler.engines):
            sampler.replicas.resize(wanted)
        return sampler

    def _join(self, session: Session, model: BaseModelEntry, *, rank: int) -> Sampler | None:
        """Let a session use another session's sampler for the base model or adapters of `rank`.
        The session would ask for equal engines. No run keeps them, and they have the base model's
        weights."""
        for sampler in self._samplers.values():
            if (
                (sampler.model.name, sampler.model.path) == (model.name, model.path)
                and self.takes_adapters(str(sampler.key), rank=rank)
                and self._may_share(session, sampler.owner, sampler.engine.options)
                and self._options_of(session, model.name) == sampler.engine.options
                and str(sampler.key) not in self._kept
            ):
                sampler.users.add(session.id)
                return sampler
        return None

    def _may_share(self, session: Session, owner: str, options: RunOptions) -> bool:
        same_owner = session.owner == owner or self.settings.sharing.across_owners
        return same_owner and options.share != "never"

    def check_model(self, session_id: str, model_name: str) -> None:
        """Raise `InvalidRequest` if all the session's engines would be on a CPU and vLLM cannot
        compute the model's head size there. Raises `SessionFinished`, and as `options_of`."""
        session = self.sessions.require(session_id)
        model = next((each for each in self.models.all() if each.name == model_name), None)
        if model is None:
            return
        options = self._options_of(session, model_name)
        if not sampled_on_cpu(options, self.requests.groups()):
            return
        config: Mapping[str, object] = {}
        with suppress(OSError, ValueError):  # the load reports these errors
            config = read_json(self.settings.data_dir / model.path / "config.json")
        size = head_size(config)
        if size is not None and (reason := why_unserved_by_cpu(size)):
            raise InvalidRequest(f"the model {model_name} cannot be sampled here: {reason}")

    def allow(self, key: str, allowed: ReplicaRange) -> None:
        """Set the range that a run wants for a sampler's engines, unless the sampler was scaled. It
        may not exist yet."""
        self._ranges[key] = allowed
        sampler = self._samplers.get(key)
        if sampler is not None and not sampler.replicas.scaled:
            sampler.replicas.allowed = allowed

    async def set_range(self, sampler: Sampler, allowed: ReplicaRange | None) -> None:
        """Set the range of a sampler's engines, None for a fixed number, until the sampler ends."""
        sampler.replicas.allowed, sampler.replicas.scaled = allowed, True
        await self.sessions.set_engine_range(
            sampler.users | {sampler.key.session_id},
            str(sampler.key),
            None if allowed is None else (allowed.least, allowed.most),
        )

    async def scale(self, sampler: Sampler, replicas: int, *, wait: float) -> None:
        """Set the number of a sampler's engines. New ones need devices within `wait` seconds, or
        nothing changes. Surplus engines end when idle. Raises `NoRoom`, `InvalidRequest` if no
        group has the devices, `LimitExceeded`, `StorageFailed`, and `UnknownSampler` if the sampler
        ends."""
        key, first = str(sampler.key), sampler.engine
        async with self._scaling[key]:
            had, back = len(sampler.engines), await sampler.replicas.settled()
            if replicas > had:
                self._check_engines(sampler.owner, adding=replicas - had)
                sampler.replicas.resize(min(replicas, back))
            requests = self.engine_requests(
                key, first.options, owner=sampler.owner, model=sampler.model, replicas=replicas
            )
            held = self.supervisor.held_by(key)
            try:
                await self.supervisor.resize(key, requests, within=wait, keeping=held)
            except BaseException:
                sampler.replicas.resize(had)
                raise
            if self._samplers.get(key) is not sampler:
                await self.release_unused(key)
                raise UnknownSampler("the sampler ended with its session")
            sampler.replicas.resize(replicas)
            if replicas > had:
                sampler.start()

    def engine_requests(
        self,
        key: str,
        options: RunOptions,
        *,
        owner: str,
        model: BaseModelEntry,
        replicas: int = 0,
    ) -> list[WorkerRequest]:
        """Return the requests for a sampler's engines: `replicas`, or else its present number, or
        else the wanted number."""
        parsed = SamplerKey.parse(key)
        if key in self._apart:
            options = options.model_copy(update={"sharing": self._apart[key]})
        number = replicas or self._replicas_of(key, asked=options.replicas)
        keys = [engine_key(key, each) for each in range(number)]
        return [
            self.requests.engine(
                each,
                sampler=key,
                owner=owner,
                session=parsed.session_id,
                model=model.path,
                options=options,
                max_lora_rank=parsed.max_lora_rank,
                together=keys,
            )
            for each in keys
        ]

    def _replicas_of(self, key: str, *, asked: int) -> int:
        """Return the number of a sampler's engines with a row, or `asked` without any."""
        return len(engines_of(self.supervisor.overview(), key)) or asked

    def keep(self, key: str, *, sharing: Sharing | None = None, apart: bool = False) -> None:
        """Let no more sessions join a sampler, because a trainer keeps its engines. It may not
        exist yet. A run `apart` has all engines of the sampler to itself, with its `sharing`."""
        self._kept.add(key)
        if apart:
            self._apart[key] = sharing

    async def release_unused(self, key: str) -> None:
        """Note that no trainer keeps a sampler. Release its engines if it has no users. Otherwise
        they share their devices as their session says."""
        self._kept.discard(key)
        sampler, apart = self._samplers.get(key), key in self._apart
        self._apart.pop(key, None)
        if sampler is None:
            held = self.supervisor.held_by(key)
            await asyncio.gather(*(self.supervisor.release(each, holder=key) for each in held))
        elif apart:
            self.supervisor.set_sharing(key, sampler.engine.options.sharing)

    def keys(self) -> set[str]:
        """Return the keys of all samplers."""
        return set(self._samplers)

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
        check: Check,
        tell: Tell | None = None,
    ) -> None:
        """Start a sample. `check` raises if a version may not answer it, now and when it is sent.
        `tell` receives its tokens as they are drawn. Raises `Overloaded` above a bound, after which
        the SDK retries later, and `BudgetExhausted`."""
        check(request.version)
        self.limits.check_budget(future.owner)
        waiting = sampler.waiting_of[future.owner]
        if waiting >= MAX_WAITING_SAMPLES:
            self.limits.note_refusal("sampler_samples")
            raise overloaded(
                f"{waiting} samples of yours wait at this sampler, {MAX_WAITING_SAMPLES} at most",
                limit="sampler_samples",
                waiting=waiting,
                per_second=sampler.completions.per_second(),
            )
        reserved = self.limits.reserve(
            future.owner, (self.limits.samples, 1), (self.limits.held, request.ByteSize())
        )
        future.on_end(lambda _outcome: reserved.close())
        sample = SampleCall(future=future, request=request, check=check, tell=tell)
        sampler.queue_sample(sample)
        sampler.begin_sample(sample)

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
                    self._ranges.pop(key, None)
                else:
                    self._pass_on(sampler)
        await asyncio.gather(*(sampler.stop(error) for sampler in ended))

    def _pass_on(self, sampler: Sampler) -> None:
        """Count a sampler's engines for another owner if its owner has no session there."""
        found = [self.sessions.get(user) for user in sorted(sampler.users)]
        owners = [session.owner for session in found if session is not None]
        if owners and sampler.owner not in owners:
            sampler.owner = owners[0]

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
        options = self._options_of(session, model.name)
        allowed = self._ranges.get(str(key), ReplicaRange.of(options))
        scaled = session.engine_ranges or {}
        if str(key) in scaled:
            allowed = ReplicaRange(*found) if (found := scaled[str(key)]) else None
        asked = max(options.replicas, allowed.least if allowed else 1)
        # A run of the session may have asked for more, or the sampler was scaled.
        replicas = self._replicas_of(str(key), asked=asked)

        def requests(number: int) -> list[WorkerRequest]:
            return self.engine_requests(
                str(key), options, owner=session.owner, model=model, replicas=number
            )

        if limited:
            self._check_engines(session.owner, adding=replicas)
            self.supervisor.check(requests(replicas))
        engine = SamplerEngine(
            key=engine_key(str(key), 0),
            sampler=str(key),
            session_id=key.session_id,
            model=model,
            max_lora_rank=key.max_lora_rank,
            settings=SamplerSettings.of(
                self.settings.sampler, operation_timeout=self.settings.operation_timeout
            ),
            options=options,
            supervisor=self.supervisor,
            adapter=self.adapter,
            processes=self.processes,
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
            requests=requests,
        )
        sampler.replicas.resize(replicas)
        sampler.replicas.allowed, sampler.replicas.scaled = allowed, str(key) in scaled
        return sampler

    def _options_of(self, session: Session, model_name: str) -> RunOptions:
        return options_of(
            None,
            session.user_metadata,
            model=model_name,
            settings=self.settings,
            groups=self.requests.groups(),
            admin=True,  # checked when the session was created
        )

    def _free_key(
        self, session_id: str, model_name: str, rank: int, *, taken: Container[str] = ()
    ) -> SamplerKey:
        """Return the key of a session's new sampler, none of `taken`. Others may share the
        session's first one."""
        largest = self._largest_rank(rank)
        keys = (SamplerKey(session_id, model_name, largest, number) for number in count())
        return next(key for key in keys if str(key) not in self._samplers and str(key) not in taken)

    def _check_engines(self, owner: str, *, adding: int) -> None:
        theirs = (each for each in self._samplers.values() if each.owner == owner)
        used = sum(len(each.engines) for each in theirs)
        if adding > 0:
            self.limits.check("samplers", owner=owner, used=used, adding=adding)

    def _largest_rank(self, rank: int) -> int:
        """Round up to a power of two, as engines do in memory, so that runs of similar ranks share
        an engine."""
        if rank == 0:
            return 0
        largest = max(rank, _SMALLEST_RANK)
        return min(1 << (largest - 1).bit_length(), _LARGEST_RANK)
