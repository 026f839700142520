"""Usage for the SDK's billing calls, by hour, session, base model and kind, and sums by owner and
run. There are no prices."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    RowMapping,
    Select,
    Text,
    case,
    cast,
    desc,
    func,
    literal,
    select,
    union_all,
)

from gateway.owners.auth.identity import Caller, visible
from gateway.owners.usage.meter import HOUR, UsageMeter
from gateway.storage.database import Database, from_row
from gateway.storage.tables import checkpoints, runs, sessions, usage, worker_events

EventType = Literal[
    "training", "sampling_prefill", "sampling_prefill_cached", "sampling_sample", "checkpoint"
]

_CHECKPOINT = usage.c.event.in_(
    ["save_weights", "save_weights_for_sampler", "save_weights_external"]
)
_SAMPLE = usage.c.event == "sample"
_COUNTED: Mapping[EventType, tuple[ColumnElement[bool], ColumnElement[int], bool]] = {
    # Includes publishing, which has no tokens.
    "training": (~(_CHECKPOINT | _SAMPLE), usage.c.input_tokens, True),
    "checkpoint": (_CHECKPOINT, usage.c.count, True),
    "sampling_prefill": (_SAMPLE, usage.c.input_tokens - usage.c.cached_tokens, False),
    "sampling_prefill_cached": (_SAMPLE, usage.c.cached_tokens, False),
    "sampling_sample": (_SAMPLE, usage.c.output_tokens, True),
}
"""For each type: its rows, its quantity, and whether it carries the accelerator seconds. A sample
reports them once."""


_TAG = "blueprint:"
_USED = (
    "training_tokens",
    "prompt_tokens",
    "cached_tokens",
    "sampled_tokens",
    "accelerator_seconds",
)


@dataclass(frozen=True)
class UsageEvent:
    """One hour (`hour` in seconds since 1970) of one session with one base model. `quantity` is in
    tokens, or saves for a checkpoint."""

    hour: int
    type: EventType
    session_id: str
    project_id: str
    owner: str
    base_model: str
    quantity: int
    accelerator_seconds: float


@dataclass(frozen=True)
class UsageReport:
    """`metadata` maps each session in the events to its user metadata."""

    events: Sequence[UsageEvent]
    metadata: Mapping[str, Mapping[str, str] | None]


@dataclass(frozen=True)
class OwnerUsage:
    """`training_tokens` were trained. Samples used `prompt_tokens`, `cached_tokens` of them from
    the prefix cache, and returned `sampled_tokens`. `checkpoints` exist now."""

    owner: str
    training_tokens: int
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    accelerator_seconds: float
    checkpoints: int
    checkpoint_bytes: int


@dataclass(frozen=True)
class RunUsage(OwnerUsage):
    """`owner` trained the run or sampled from its weights."""

    run_id: str
    name: str
    base_model: str


@dataclass(frozen=True)
class UsageSummary:
    owners: Sequence[OwnerUsage]
    runs: Sequence[RunUsage]


@dataclass(frozen=True)
class BlueprintUsage:
    """The work of an owner on a blueprint, "" for all other work. `runs` began or trained. The
    workers of their sessions waited for places for `queue_seconds`, and devices computed for
    `device_seconds`."""

    owner: str
    blueprint: str
    runs: int
    queue_seconds: float
    device_seconds: float


@dataclass(frozen=True)
class BlueprintReport:
    blueprints: Sequence[BlueprintUsage]


Usage = TypeVar("Usage", bound=OwnerUsage)


class BillingReports:
    def __init__(self, *, database: Database, usage: UsageMeter) -> None:
        self._database = database
        self._usage = usage

    async def events(
        self,
        caller: Caller,
        *,
        starting_on: int,
        ending_before: int,
        project_id: str | None = None,
        session_id: str | None = None,
    ) -> UsageReport:
        """Return the caller's visible usage by hour, largest quantity first.

        Times are in seconds since 1970, on the hour. A session counts for its current project."""
        self._usage.write()
        await self._database.flush()
        wanted = [
            usage.c.hour >= starting_on,
            usage.c.hour < ending_before,
            visible(usage.c.owner, caller, "accessible"),
        ]
        joined = sessions.c.id == usage.c.session_id
        project = func.coalesce(sessions.c.project_id, usage.c.project_id)
        if project_id is not None:
            wanted.append(project == project_id)
        if session_id is not None:
            wanted.append(usage.c.session_id == session_id)
        group = (usage.c.hour, usage.c.session_id, usage.c.owner, usage.c.base_model)
        counted = union_all(
            *(
                select(
                    *group,
                    literal(type_).label("type"),
                    func.max(project).label("project_id"),
                    cast(func.sum(quantity), BigInteger).label("quantity"),
                    func.sum(usage.c.accelerator_seconds * int(timed)).label("accelerator_seconds"),
                )
                .join(sessions, joined, isouter=True)
                .where(*wanted, rows)
                .group_by(*group)
                for type_, (rows, quantity, timed) in _COUNTED.items()
            )
        )
        found = [from_row(UsageEvent, row) for row in await self._database.read(counted)]
        events = [event for event in found if event.quantity or event.accelerator_seconds]
        events.sort(key=lambda e: (e.hour, -e.quantity, e.session_id, e.base_model, e.type))
        used = select(usage.c.session_id).join(sessions, joined, isouter=True).where(*wanted)
        rows = await self._database.read(
            select(sessions.c.id, sessions.c.user_metadata).where(sessions.c.id.in_(used))
        )
        known = {row["id"]: row["user_metadata"] for row in rows}
        metadata = {event.session_id: known.get(event.session_id) for event in events}
        return UsageReport(events=events, metadata=metadata)

    async def summary(self, caller: Caller, *, since: float, max_runs: int) -> UsageSummary:
        """Sum the caller's visible usage in the hours after `since` (seconds since 1970), by owner,
        and by run and owner for the runs with the most accelerator seconds. A sample counts for its
        weights' run and its sender."""
        self._usage.write()
        await self._database.flush()
        sampled = usage.c.event == "sample"
        nothing = literal(0)
        used = select(
            usage.c.owner,
            usage.c.run_id,
            usage.c.base_model,
            case((sampled, 0), else_=usage.c.input_tokens).label("training_tokens"),
            case((sampled, usage.c.input_tokens), else_=0).label("prompt_tokens"),
            usage.c.cached_tokens,
            usage.c.output_tokens.label("sampled_tokens"),
            usage.c.accelerator_seconds,
            nothing.label("checkpoints"),
            nothing.label("checkpoint_bytes"),
        ).where(usage.c.hour > since - HOUR, visible(usage.c.owner, caller, "accessible"))
        expires_at = checkpoints.c.expires_at
        kept = expires_at.is_(None) | (expires_at > time.time())
        stored = select(
            checkpoints.c.owner,
            checkpoints.c.run_id,
            checkpoints.c.base_model,
            *(nothing.label(name) for name in _USED),
            literal(1).label("checkpoints"),
            checkpoints.c.bytes.label("checkpoint_bytes"),
        ).where(kept, visible(checkpoints.c.owner, caller, "accessible"))
        both = union_all(used, stored).subquery()
        sums = [
            func.sum(both.c[name]).label(name)
            for name in (*_USED, "checkpoints", "checkpoint_bytes")
        ]
        largest: list[ColumnElement[str]] = [
            desc("accelerator_seconds"),
            desc("checkpoint_bytes"),
            both.c.owner,
        ]
        named = visible(runs.c.owner, caller, "accessible")
        by_owner = select(both.c.owner, *sums).group_by(both.c.owner).order_by(*largest)
        by_run = (
            select(
                both.c.owner,
                both.c.run_id,
                func.coalesce(func.max(runs.c.name), "").label("name"),
                func.max(both.c.base_model).label("base_model"),
                *sums,
            )
            .outerjoin(runs, (runs.c.id == both.c.run_id) & named)
            .where(both.c.run_id != "")
            .group_by(both.c.owner, both.c.run_id)
            .order_by(*largest, both.c.run_id)
            .limit(max_runs)
        )
        return UsageSummary(
            owners=[_used(OwnerUsage, row) for row in await self._database.read(by_owner)],
            runs=[_used(RunUsage, row) for row in await self._database.read(by_run)],
        )

    async def by_blueprint(self, caller: Caller, *, since: float) -> BlueprintReport:
        """Sum the caller's visible work since a time (seconds since 1970), by owner and blueprint.
        The tag `blueprint:NAME` of a run names that of its whole session. Device seconds count
        from the hour on, and queue seconds as long as worker events are kept."""
        self._usage.write()
        await self._database.flush()
        recent = (usage.c.hour > since - HOUR) & visible(usage.c.owner, caller, "accessible")
        at_work = select(usage.c.run_id).where(recent, usage.c.event != "sample")
        mine = visible(runs.c.owner, caller, "accessible")
        zero, none = literal(0), literal(0.0)
        work = union_all(
            select(
                runs.c.owner,
                runs.c.session_id,
                literal(1).label("runs"),
                none.label("queue_seconds"),
                none.label("device_seconds"),
            ).where(mine, (runs.c.created_at >= since) | runs.c.id.in_(at_work)),
            _queued(caller, since=since, now=time.time()),
            select(
                usage.c.owner, usage.c.session_id, zero, none, usage.c.accelerator_seconds
            ).where(recent),
        ).subquery()
        text = cast(runs.c.tags, Text)
        # PostgreSQL reads no text with this character from JSON.
        readable = text.contains(f'"{_TAG}') & ~text.contains("\\u0000", autoescape=True)
        tag = self._database.elements_of(case((readable, runs.c.tags)))
        names = (
            select(runs.c.session_id, func.max(tag.c.value).label("tag"))
            .where(mine, func.substr(tag.c.value, 1, len(_TAG)) == _TAG)
            .group_by(runs.c.session_id)
            .subquery()
        )
        sums = ("runs", "queue_seconds", "device_seconds")
        rows = await self._database.read(
            select(
                work.c.owner,
                func.coalesce(func.substr(names.c.tag, len(_TAG) + 1), "").label("blueprint"),
                *(func.sum(work.c[name]).label(name) for name in sums),
            )
            .outerjoin(names, names.c.session_id == work.c.session_id)
            .group_by(work.c.owner, "blueprint")
            .order_by(work.c.owner, "blueprint")
        )
        return BlueprintReport([from_row(BlueprintUsage, row) for row in rows])


def _queued(caller: Caller, *, since: float, now: float) -> Select[Any]:
    """Select the times without a place or a process of workers."""
    table = worker_events.c
    events = select(
        table.owner,
        table.session_id,
        table.state,
        case((table.at < since, since), else_=table.at).label("begin"),
        func.lead(table.at, 1, now).over(partition_by=table.key, order_by=table.id).label("end"),
    ).where(visible(table.owner, caller, "accessible"))
    span = events.subquery().c
    waited = (span.end - span.begin).label("queue_seconds")
    return select(
        span.owner, span.session_id, literal(0).label("runs"), waited, literal(0.0).label("devices")
    ).where(span.state.in_(["waiting", "placed"]), span.end > span.begin)


def _used(type_: type[Usage], row: RowMapping) -> Usage:
    """Convert the sums, because PostgreSQL returns decimals."""
    counts = {name: int(row[name]) for name in (*_USED, "checkpoints", "checkpoint_bytes")}
    seconds = {"accelerator_seconds": float(row["accelerator_seconds"])}
    return from_row(type_, row, **counts | seconds)
