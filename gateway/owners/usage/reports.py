"""Usage for the SDK's billing calls, by hour, session, base model and kind, and sums by owner and
run. There are no prices."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    RowMapping,
    Select,
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
        used = await self._database.read(
            select(
                usage.c.owner,
                usage.c.session_id,
                usage.c.run_id,
                usage.c.event,
                func.sum(usage.c.accelerator_seconds).label("seconds"),
            )
            .where(recent)
            .group_by(usage.c.owner, usage.c.session_id, usage.c.run_id, usage.c.event)
        )
        queued = await self._database.read(_queued(caller, since=since, now=time.time()))
        at_work_in = union_all(
            select(usage.c.session_id).where(recent),
            select(worker_events.c.session_id).where(
                visible(worker_events.c.owner, caller, "accessible")
            ),
        )
        found = await self._database.read(
            select(
                runs.c.id, runs.c.owner, runs.c.session_id, runs.c.tags, runs.c.created_at
            ).where(
                visible(runs.c.owner, caller, "accessible"),
                (runs.c.created_at >= since) | runs.c.session_id.in_(at_work_in),
            )
        )
        names = {
            row["session_id"]: tag.removeprefix(_TAG)
            for row in found
            for tag in row["tags"] or ()
            if tag.startswith(_TAG)
        }
        sums: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        at_work = {row["run_id"] for row in used if row["event"] != "sample"}
        counted = [row for row in found if row["created_at"] >= since or row["id"] in at_work]
        for index, rows in enumerate((counted, queued, used)):
            for row in rows:
                amount = float(row["seconds"]) if index else 1
                sums[row["owner"], names.get(row["session_id"], "")][index] += amount
        return BlueprintReport(
            blueprints=[
                BlueprintUsage(owner, blueprint, int(number), queue, devices)
                for (owner, blueprint), (number, queue, devices) in sorted(sums.items())
            ]
        )


def _queued(caller: Caller, *, since: float, now: float) -> Select[Any]:
    """Select the seconds without a place or a process of each session's workers."""
    table = worker_events.c
    events = select(
        table.owner,
        table.session_id,
        table.state,
        case((table.at < since, since), else_=table.at).label("begin"),
        func.lead(table.at, 1, now).over(partition_by=table.key, order_by=table.id).label("end"),
    ).where(visible(table.owner, caller, "accessible"))
    span = events.subquery().c
    return (
        select(span.owner, span.session_id, func.sum(span.end - span.begin).label("seconds"))
        .where(span.state.in_(["waiting", "placed"]), span.end > span.begin)
        .group_by(span.owner, span.session_id)
    )


def _used(type_: type[Usage], row: RowMapping) -> Usage:
    """Convert the sums, because PostgreSQL returns decimals."""
    counts = {name: int(row[name]) for name in (*_USED, "checkpoints", "checkpoint_bytes")}
    seconds = {"accelerator_seconds": float(row["accelerator_seconds"])}
    return from_row(type_, row, **counts | seconds)
