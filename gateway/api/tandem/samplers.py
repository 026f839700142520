"""Shows and scales the engines of a sampling session or a run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import BaseModel, Field

from gateway.api.dependencies import Access, AccessDep
from gateway.api.fields import Answer, PathText
from gateway.api.routing import Router
from gateway.api.tinker.sampling import sampler_of
from gateway.sampling.replicas import ReplicaRange, VersionState
from gateway.sampling.sampler import Sampler
from gateway.workers.model_sizes import read_ahead
from tandem.errors import (
    InvalidRequest,
    NoRoom,
    PermissionDenied,
    SessionFinished,
    StorageFailed,
    UnknownRun,
    UnknownSampler,
    UnknownSession,
)

router = Router("/api/tandem/v1", tag="Tandem")


class ScaleSampler(BaseModel):
    """`replicas` is the new number of engines, or else `min` and `max`, between which the number
    follows the queue. With the minimum 0, the last engine gives back its place after 10 minutes
    without a sample. New engines may wait `wait` seconds for their places, which they get together
    or not at all."""

    replicas: Annotated[int | None, Field(ge=1, le=64)] = None
    min: Annotated[int, Field(ge=0, le=64)] = 1
    max: Annotated[int | None, Field(ge=1, le=64)] = None
    wait: Annotated[float, Field(ge=0, le=600)] = 0.0

    def replica_range(self) -> ReplicaRange | None:
        """Return the range, None for a fixed number. Raises `InvalidRequest`."""
        if (self.replicas is None) == (self.max is None):
            raise InvalidRequest("give either replicas, or max with or without min")
        if self.max is None:
            return None
        if self.max < self.min:
            raise InvalidRequest(f"max is {self.max}, which is below min ({self.min})")
        return ReplicaRange(self.min, self.max)


class EngineCounts(Answer):
    """`replicas` is the target number of engines, `serving` the number that answer now. `leaving`
    further ones are finishing their requests."""

    replicas: int
    serving: int
    leaving: int

    @classmethod
    def of_sampler(cls, sampler: Sampler, **others: object) -> Self:
        return cls.of(
            sampler,
            replicas=len(sampler.engines),
            serving=sum(engine.serves for engine in sampler.engines),
            leaving=len(sampler.replicas.leaving),
            **others,
        )


class ScaledSampler(EngineCounts):
    """`sessions` are the sampler's sessions. `min` and `max` are null for a fixed number."""

    base_model: str
    sessions: list[str]
    min: int | None
    max: int | None

    @classmethod
    def of_sampler(cls, sampler: Sampler, **others: object) -> Self:
        allowed = sampler.replicas.allowed
        least, most = (allowed.least, allowed.most) if allowed else (None, None)
        return super().of_sampler(
            sampler, base_model=sampler.model.name, min=least, max=most, **others
        )


class SamplerEngineState(Answer):
    """`worker` is empty without a process. `refused` has the versions that the engine refused
    although others serve them, with reasons. It gets no samples of these. `running` counts its
    requests, `waiting` requests for other weights, `queued` samples without room. `kv_used` is the
    used share of its KV cache. The numbers are null unless the engine is awake and answers."""

    replica: int
    worker: str
    state: str
    versions: list[str]
    refused: dict[str, str]
    running: int | None
    waiting: int | None
    queued: int | None
    kv_used: float | None


class ServedVersion(Answer):
    """`live`: all serving engines have the version. `degraded`: an engine refused it. `partial`:
    some engines have it, and others load it for their next sample."""

    name: str
    state: VersionState


class SamplerState(ScaledSampler):
    """`waiting` counts samples and requests without room, in the gateway and in the engines.
    `kv_used` is the fullest engine's. Sessions and weights of other owners are absent."""

    waiting: int
    kv_used: float
    versions: list[ServedVersion]
    engines: list[SamplerEngineState]


@router.operation(
    "GET",
    "/samplers/{target}",
    role="reader",
    errors=[SessionFinished, UnknownRun, UnknownSampler, UnknownSession],
    rules=["A session must have one sampler; with several, a run or a sampling session is named."],
)
async def sampler_state(target: PathText, access: AccessDep) -> SamplerState:
    """Return the engines of a run, a sampling session, or a session with one sampler, with their
    versions and load."""
    sampler = await _sampler(target, access)
    mine = {each.id for each in access.gateway.sessions.all() if access.caller.may_see(each.owner)}

    def seen(names: Iterable[str]) -> list[str]:
        return sorted(n for n in names if n.startswith("base/") or n.partition(":")[0] in mine)

    abouts = await asyncio.gather(*(engine.describe() for engine in sampler.engines))
    known = [about for about in abouts if about is not None]
    names = seen({name for each in sampler.engines for name in (*each.loaded, *each.refused)})
    return SamplerState.of_sampler(
        sampler,
        sessions=sorted(sampler.users & mine),
        waiting=sampler.unsent + sum(about.waiting + about.queued for about in known),
        kv_used=max((about.kv_used for about in known), default=0.0),
        versions=[
            ServedVersion(name=name, state=sampler.replicas.state_of(name)) for name in names
        ],
        engines=[
            SamplerEngineState.of(
                engine,
                worker=engine.process,
                versions=seen(engine.loaded),
                refused={name: engine.refused[name] for name in seen(engine.refused)},
                running=about.running if about else None,
                waiting=about.waiting if about else None,
                queued=about.queued if about else None,
                kv_used=about.kv_used if about else None,
            )
            for engine, about in zip(sampler.engines, abouts, strict=True)
        ],
    )


@router.operation(
    "PUT",
    "/samplers/{target}/replicas",
    role="member",
    audit="sampler_scale",
    errors=[
        NoRoom,
        SessionFinished,
        StorageFailed,
        UnknownRun,
        UnknownSampler,
        UnknownSession,
    ],
    rules=[
        "A session must have one sampler; with several, a run or a sampling session is named.",
        "There must be groups with so many devices.",
    ],
)
async def scale_sampler(target: PathText, body: ScaleSampler, access: AccessDep) -> ScaledSampler:
    """Set the number of engines of a run, a sampling session, or a session with one sampler. New
    engines get their places at once, or nothing changes. They start, load the last used version,
    and then get requests. Surplus engines get no new requests, finish their current ones, and
    release their places. The choice holds until the sampler ends, and can be changed at any time.
    """
    allowed = body.replica_range()
    number = str(body.replicas) if allowed is None else f"{allowed.least} to {allowed.most}"
    access.audit.note(target, replicas=number)
    sampler = await _sampler(target, access)
    sessions = access.gateway.sessions
    owners = {found.owner for user in sampler.users if (found := sessions.get(user)) is not None}
    if not all(access.caller.may_see(owner) for owner in owners):
        raise PermissionDenied(
            "the sampler is shared with sessions of other owners; an admin can scale it"
        )
    has = len(sampler.engines)
    replicas = body.replicas or has
    if allowed is not None:
        replicas = min(max(has, allowed.least), allowed.most)
    if replicas != has or allowed is None:
        await access.gateway.samplers.scale(sampler, replicas, wait=body.wait)
    await access.gateway.samplers.set_range(sampler, allowed)
    return ScaledSampler.of_sampler(sampler, sessions=sorted(sampler.users))


async def _sampler(target: str, access: Access) -> Sampler:
    gateway = access.gateway
    if ":sample:" in target:
        sampling_session = await access.sampling_session(target)
        await read_ahead(gateway.models.get(sampling_session.base_model).path, gateway.settings)
        return sampler_of(gateway, sampling_session)
    if ":train:" in target:
        session = await access.run(target)
        run = gateway.runs.get(target)
        if run is None:
            raise UnknownRun(f"there is no training run {target!r} that has not ended")
        await read_ahead(run.model.path, gateway.settings)
        return gateway.samplers.ensure(
            session_id=session.id,
            model=run.model,
            rank=run.training.rank,
            all_weights=run.training.lora is None,
            kept=run.host.sampler,
        )
    session = await access.session(target)
    found = [each for each in gateway.samplers.all() if session.id in each.users]
    if len(found) != 1:
        has = "several samplers" if found else "no sampler yet"
        raise InvalidRequest(
            f"session {target} has {has}: name one of its runs ({target}:train:0 and so on) or of "
            f"its sampling sessions ({target}:sample:0 and so on)"
        )
    return found[0]
