"""Sampling sessions: the weights behind a SamplingClient.

The kinds are `base` (a base model), `named` (a checkpoint), and two ephemeral ones that a run's
save creates: `snapshot` (fixed weights) and `inflight` (the run's newest inflight save, also for
samples in progress). Requests that name a model instead use `ImplicitSessions`."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal

from sqlalchemy import RowMapping, insert, select, update
from sqlalchemy.exc import IntegrityError

from gateway.checkpoints.base_models import BaseModelEntry, BaseModels
from gateway.checkpoints.catalog import CheckpointCatalog
from gateway.checkpoints.versions import VersionStore, WeightVersion
from gateway.identifiers import (
    relative_version_folder,
    sampling_session_id_of,
    split_model_name,
    unknown_sampler,
)
from gateway.owners.auth.identity import Readers
from gateway.owners.limits import Quotas
from gateway.owners.sessions.registry import SessionRegistry
from gateway.sampling.bounds import Bounds
from gateway.sampling.early_sessions import EarlySessions
from gateway.sampling.router import SamplerRouter
from gateway.storage.database import Database, from_row
from gateway.storage.tables import sampling_sessions
from tandem.errors import (
    InvalidRequest,
    SequenceTaken,
    StorageFailed,
    UnknownSampler,
    UnknownWeights,
    describe,
)
from tandem.telemetry import get_log
from tandem.v1 import sampler_pb2
from tandem.weights import version_number

SamplingKind = Literal["base", "named", "snapshot", "inflight"]

SamplingUpdates = Literal["wait", "keep", "abort"]
_UPDATES = {"keep": sampler_pb2.UPDATES_KEEP, "abort": sampler_pb2.UPDATES_ABORT}

SUPERSEDED_TTL = 300.0
"""Seconds of disuse after which a session ends if its run has `NEWEST_KEPT` newer versions."""
NEWEST_KEPT = 4
"""Newest versions of a run that `SUPERSEDED_TTL` spares."""


@dataclass
class SamplingSession:
    """`version` is the current version, `model_path` the client's path, if any. `rank` is its
    adapter's, or 0. `clients` counts joins. `seq_ids` numbers an implicit session's requests. See
    `Bounds` for `min_version` and `max_staleness`. `updates` says what newer weights of the run do
    to running samples. None: those of the kind `inflight` continue with in-flight saves, and others
    end first."""

    id: str
    session_id: str
    kind: SamplingKind
    base_model: str
    model_path: str
    version: WeightVersion
    rank: int = 0
    clients: int = 0
    min_version: int | None = None
    max_staleness: int | None = None
    updates: SamplingUpdates | None = None
    seq_ids: count[int] = field(default_factory=count)
    used_at: float = field(default_factory=time.monotonic)

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.min_version, self.max_staleness)

    def choose_updates(self, request: sampler_pb2.SampleRequest) -> None:
        in_flight = self.updates is None and self.kind == "inflight"
        request.in_flight = in_flight or self.updates in _UPDATES
        request.updates = _UPDATES.get(self.updates or "", sampler_pb2.UPDATES_DEFAULT)

    @property
    def all_weights(self) -> bool:
        """Whether its version replaces the weights of the base model."""
        return bool(self.version.run_id) and not self.version.adapter


@dataclass(eq=False, kw_only=True)
class SamplingSessionRegistry:
    """`idle_ttl` is in seconds; see `expire_idle`."""

    database: Database
    models: BaseModels
    checkpoints: CheckpointCatalog
    versions: VersionStore
    sessions: SessionRegistry
    samplers: SamplerRouter
    limits: Quotas
    idle_ttl: float
    _active: dict[str, SamplingSession] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._early = EarlySessions()
        self._log = get_log()

    async def restore_sessions(self) -> None:
        """Restore sampling sessions with an existing session, model and weights. End and log the
        others."""
        for row in await self.database.read(
            select(sampling_sessions)
            .where(sampling_sessions.c.state == "active")
            .order_by(sampling_sessions.c.created_at)
        ):
            try:
                self._active[row["id"]] = await self._restore(row)
            except (ValueError, TypeError, KeyError) as error:  # a `UserError`, or a malformed row
                self._update([row["id"]], state="ended", ended_at=time.time())
                self._log.warning(
                    "sampling_session_not_restored",
                    sampling_session_id=row["id"],
                    session_id=row["session_id"],
                    reason=describe(error),
                )

    def all(self) -> list[SamplingSession]:
        return list(self._active.values())

    async def create(
        self,
        *,
        session_id: str,
        number: int,
        base_model: str | None,
        model_path: str | None,
        readers: Readers,
    ) -> SamplingSession:
        """Create a sampling session for a base model, or a checkpoint that `readers` may read.

        Idempotent: a repeated number with an equal source returns the original. Raises
        `SequenceTaken` for another source, `UnknownModel`, `UnknownWeights`, `InvalidRequest`,
        `LimitExceeded` or `SessionFinished`."""
        existing = self._active.get(sampling_session_id_of(session_id=session_id, number=number))
        if existing is not None:
            return _repeated(existing, base_model=base_model, model_path=model_path)
        if model_path:
            async with self.checkpoints.reading(model_path, readers=readers) as checkpoint:
                if checkpoint.path.kind != "sampler_weights":
                    what = (
                        "a trainer's state" if checkpoint.path.kind == "weights" else "a download"
                    )
                    raise UnknownWeights(
                        f"{str(checkpoint.path)!r} holds {what}; sample from what "
                        "save_weights_for_sampler wrote (tinker://RUN/sampler_weights/NAME)"
                    )
                session = await self._new(
                    session_id=session_id,
                    number=number,
                    kind="named",
                    model_path=model_path,
                    version=await self.versions.version(checkpoint.version),
                )
                return await self._add(session)
        if not base_model:
            raise InvalidRequest("a sampling session needs a base_model or a model_path")
        name, _full = split_model_name(base_model)
        session = await self._new(
            session_id=session_id,
            number=number,
            kind="base",
            version=base_version(self.models.get(name)),
        )
        return await self._add(session)

    async def serve(
        self, *, session_id: str, number: int, model_path: str, version: WeightVersion, rank: int
    ) -> SamplingSession:
        """Return the sampling session of this number, created if needed, and switch it to this
        version. The caller must have checked access and must pin the files. Raises `LimitExceeded`.
        """
        session = self._active.get(sampling_session_id_of(session_id=session_id, number=number))
        if session is None:
            new = await self._new(
                session_id=session_id,
                number=number,
                kind="named" if version.run_id else "base",
                model_path=model_path,
                version=version,
            )
            session = await self._add(new)
        if session.version.name != version.name:
            session.version, session.rank = version, rank
            self._update([session.id], version=version.name, run_id=version.run_id)
        session.used_at = time.monotonic()
        return session

    async def open_ephemeral(
        self,
        *,
        session_id: str,
        number: int,
        kind: Literal["snapshot", "inflight"],
        version: WeightVersion,
    ) -> SamplingSession:
        """Open a sampling session for a run's new version, within `opening` and before `record`. A
        repeated call returns the original."""
        session = self._active.get(sampling_session_id_of(session_id=session_id, number=number))
        if (
            session is None
            or session.kind != kind
            or session.version.run_id != version.run_id
            or _number(session.version) < _number(version)
        ):
            session = await self._new(
                session_id=session_id, number=number, kind=kind, version=version
            )
            if session.id not in self._active and await self._has_row(session.id):
                raise _used_before(session.id)
            self._open(session)
            self._early.note_opened(session.id, version.name)
        return session

    @contextmanager
    def opening(self, sampling_session_id: str, version: str) -> Iterator[None]:
        """End the sampling session at an error before `record`, if it was opened for `version`."""
        try:
            yield
        except BaseException as error:
            if self._early.is_open(sampling_session_id, version):
                if self._active.pop(sampling_session_id, None) is not None:
                    self._early.note_lost(sampling_session_id, error)
                else:  # its session has ended
                    self._early.note_recorded(sampling_session_id)
            raise

    def await_session(self, sampling_session_id: str, end: asyncio.Future[None]) -> None:
        """Let requests wait for a sampling session until the operation that opens it ends."""
        self._early.expect(sampling_session_id, end)

    async def record(self, sampling_session_id: str, version: WeightVersion) -> None:
        """Record an opened sampling session, whose version is durable now. An inflight save moves
        the run's earlier inflight sampling sessions to it.

        While the storage fails, the session stays without a row, until this gateway ends."""
        session = self._active.get(sampling_session_id)
        if self._early.is_open(sampling_session_id, version.name):
            try:
                if session is not None:  # otherwise its session has ended
                    session.version = version
                    await self._insert(session)
                    await self.database.sync()  # its client may ask for it much later
            except StorageFailed as error:
                assert session is not None
                self._active[session.id] = session
                self._log.warning(
                    "sampling_session_not_recorded",
                    sampling_session_id=session.id,
                    reason=error.message,
                )
            self._early.note_recorded(sampling_session_id)
        if session is None:
            return
        if session.kind == "inflight":
            of_run = [s for s in self._active.values() if s.version.run_id == version.run_id]
            inflight = [s for s in of_run if s.kind == "inflight"]
            # Two saves can load at once, and the older may finish last.
            newest = max((s.version for s in inflight), key=_number)
            for each in inflight:
                each.version = newest
            self._update([s.id for s in inflight], version=newest.name)

    async def change(
        self, session: SamplingSession, bounds: Bounds, updates: SamplingUpdates | None
    ) -> None:
        """Set a sampling session's bounds, also for its waiting samples, and its updates. Raises
        `Overloaded` before its weights are durable."""
        await self._early.until_recorded(session.id)
        await self.database.write(
            update(sampling_sessions)
            .where(sampling_sessions.c.id == session.id)
            .values(**vars(bounds), updates=updates)
        )
        session.updates = updates
        session.min_version, session.max_staleness = bounds.min_version, bounds.max_staleness

    async def join(self, sampling_session_id: str) -> int:
        """Return a unique number for another client, even across restarts. The client numbers its
        requests from 10⁹ times that number. Raises `UnknownSampler`, or `Overloaded` before its
        weights are durable."""
        session = await self.require(sampling_session_id)
        await self._early.until_recorded(session.id)
        session.clients += 1
        number = session.clients
        await self.database.write(
            update(sampling_sessions)
            .where(sampling_sessions.c.id == session.id)
            .values(clients=sampling_sessions.c.clients + 1)
        )
        return number

    async def require(self, sampling_session_id: str) -> SamplingSession:
        """Return an active sampling session. Raises `UnknownSampler`, with the reason, or
        `Overloaded` while an operation of an earlier gateway has to create it again."""
        session = self._active.get(sampling_session_id)
        if session is None:
            await self._early.until_opened(sampling_session_id)
            session = self._active.get(sampling_session_id)
        if session is not None:
            session.used_at = time.monotonic()
            return session
        if (reason := self._early.why_lost(sampling_session_id)) is not None:
            raise UnknownSampler(
                f"the weights of sampling session {sampling_session_id} are lost: {reason}"
            )
        if not await self.known(sampling_session_id):
            raise unknown_sampler(sampling_session_id)
        raise UnknownSampler(
            f"sampling session {sampling_session_id} has ended. Either its session ended, its "
            "model or weights were removed, newer weights needed its room "
            f"(TANDEM_LIMIT_UNNAMED_BYTES), or nobody used it for {self.idle_ttl:g} s "
            f"({SUPERSEDED_TTL:g} s after newer weights came). Save weights under a name to keep "
            "them"
        )

    async def known(self, sampling_session_id: str) -> bool:
        if sampling_session_id in self._active or self._early.knows(sampling_session_id):
            return True
        return await self._has_row(sampling_session_id)

    async def _has_row(self, sampling_session_id: str) -> bool:
        found = select(sampling_sessions.c.id).where(sampling_sessions.c.id == sampling_session_id)
        return await self.database.read_one(found) is not None

    def end_session(self, session_id: str) -> list[str]:
        """End a session's sampling sessions. Return the runs of their versions."""
        self._early.forget_reasons(session_id)
        return self._end([s for s in self._active.values() if s.session_id == session_id])

    def expire_idle(self) -> list[str]:
        """End unneeded ephemeral sampling sessions. Return the runs of their versions.

        Each run's newest one and pinned versions stay. Sessions of a run's `NEWEST_KEPT` newest
        versions end after `idle_ttl` of disuse, older ones after `SUPERSEDED_TTL`. If an owner's
        ephemeral versions exceed `unnamed_bytes`, older ones end at once, least recently used
        first."""
        now, in_use = time.monotonic(), self.checkpoints.pins.folders()
        newer: defaultdict[str, dict[str, int]] = defaultdict(dict)  # by run, newest first
        ended: list[SamplingSession] = []
        spare: defaultdict[WeightVersion, list[SamplingSession]] = defaultdict(list)
        held: dict[str, dict[str, int]] = defaultdict(dict)  # by owner, bytes by version
        for s in reversed(list(self._active.values())):  # newest first
            if s.kind not in ("snapshot", "inflight"):
                continue
            versions = newer[s.version.run_id]
            is_newest = not versions
            kept = versions.setdefault(s.version.name, len(versions)) < NEWEST_KEPT
            ttl = self.idle_ttl if kept else min(SUPERSEDED_TTL, self.idle_ttl)
            needed = is_newest or relative_version_folder(s.version.name) in in_use
            if not needed and now - s.used_at > ttl:
                ended.append(s)
                continue
            held[self._owner_of(s)][s.version.name] = s.version.bytes
            if not needed and not kept:
                spare[s.version].append(s)
        for sessions in sorted(spare.values(), key=lambda same: max(s.used_at for s in same)):
            versions = held[self._owner_of(sessions[0])]
            if sum(versions.values()) > self.limits.unnamed_bytes:
                del versions[sessions[0].version.name]
                ended += sessions
        return self._end(ended)

    def _owner_of(self, session: SamplingSession) -> str:
        of = self.sessions.get(session.session_id)
        return of.owner if of is not None else ""

    async def _add(self, session: SamplingSession) -> SamplingSession:
        if (existing := self._active.get(session.id)) is not None:  # two requests at once
            return _repeated(
                existing,
                base_model=session.version.base_model,
                model_path=session.model_path,
            )
        self._open(session)
        await self._insert(session)
        return session

    async def _new(
        self,
        *,
        session_id: str,
        number: int,
        kind: SamplingKind,
        version: WeightVersion,
        model_path: str = "",
    ) -> SamplingSession:
        return SamplingSession(
            id=sampling_session_id_of(session_id=session_id, number=number),
            session_id=session_id,
            kind=kind,
            base_model=version.base_model,
            model_path=model_path,
            version=version,
            rank=await self._rank_of(version),
        )

    def _open(self, session: SamplingSession) -> None:
        """Open a sampling session, which gets its row later."""
        if session.id in self._active:
            raise InvalidRequest(f"there is a sampling session {session.id} already")
        owner = self.sessions.require(session.session_id).owner
        self.samplers.check_model(session.session_id, session.base_model)
        used = self.sessions.count_of(owner, (s.session_id for s in self._active.values()))
        self.limits.check("sampling_sessions", owner=owner, used=used)
        self._active[session.id] = session

    async def _insert(self, session: SamplingSession) -> None:
        try:
            await self.database.write(
                insert(sampling_sessions),
                {
                    "id": session.id,
                    "session_id": session.session_id,
                    "kind": session.kind,
                    "base_model": session.base_model,
                    "model_path": session.model_path,
                    "run_id": session.version.run_id,
                    "version": session.version.name,
                    "state": "active",
                    "created_at": time.time(),
                },
            )
        except BaseException as error:  # also when cancelled: no session may exist without a row
            self._active.pop(session.id, None)
            if isinstance(error, IntegrityError):
                raise _used_before(session.id) from error
            raise

    async def _rank_of(self, version: WeightVersion) -> int:
        if not version.adapter:
            return 0
        return (await self.checkpoints.origin(version.run_id)).training.rank

    async def _restore(self, row: RowMapping) -> SamplingSession:
        self.sessions.require(row["session_id"])
        if row["kind"] == "base":
            version = base_version(self.models.get(row["base_model"]))
        else:
            version = await self.versions.version(row["version"])
        rank = await self._rank_of(version)
        return from_row(SamplingSession, row, version=version, rank=rank)

    def _end(self, ended: list[SamplingSession]) -> list[str]:
        for session in ended:
            del self._active[session.id]
        if ended:
            ids = [session.id for session in ended]
            self._update(ids, state="ended", ended_at=time.time())
        return sorted({s.version.run_id for s in ended if s.version.run_id})

    def _update(self, ids: list[str], **values: str | float) -> None:
        self.database.write_soon(
            update(sampling_sessions).where(sampling_sessions.c.id.in_(ids)).values(**values)
        )


def _used_before(sampling_session_id: str) -> InvalidRequest:
    return InvalidRequest(
        f"there was a sampling session {sampling_session_id} before; give each its own number"
    )


def _repeated(
    session: SamplingSession, *, base_model: str | None, model_path: str | None
) -> SamplingSession:
    if model_path:
        same = session.kind == "named" and session.model_path == model_path
    else:
        name, _full = split_model_name(base_model or "")
        is_it = name == session.base_model or Path(name) == Path(session.version.path)
        same = session.kind == "base" and is_it
    if not same:
        raise SequenceTaken(
            f"{session.id} is already another sampling session, which stays as it is: two "
            "clients number the sampling sessions of one session; make a ServiceClient for each"
        )
    return session


def _number(version: WeightVersion) -> int:
    return version_number(version.name)


def base_version(model: BaseModelEntry) -> WeightVersion:
    return WeightVersion(
        name=f"base/{model.name}", path=model.path, run_id="", step=0, base_model=model.name
    )
