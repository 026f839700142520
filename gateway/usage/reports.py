"""What was used, as the billing calls tell it: by hour, session, base model and kind.

This server has no prices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import RowMapping, func, select

from gateway.auth.identity import Caller, visible
from gateway.sessions.metadata import text_metadata
from gateway.storage.database import Database
from gateway.storage.tables import sessions, usage
from gateway.usage.meter import UsageMeter

EventType = Literal[
    "training", "sampling_prefill", "sampling_prefill_cached", "sampling_sample", "checkpoint"
]

_TRAINING = frozenset({"forward", "forward_backward", "optim_step", "load_weights"})
_CHECKPOINT = frozenset({"save_weights", "save_weights_for_sampler", "save_weights_external"})


@dataclass(frozen=True)
class UsageEvent:
    """One hour (`hour` in seconds since 1970) of one session with one base model. `quantity`
    is in tokens, for a checkpoint in saves. Accelerator seconds are told once: those of samples
    with the sampled tokens."""

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
    """`metadata`: the user metadata of each session that occurs."""

    events: Sequence[UsageEvent]
    metadata: Mapping[str, Mapping[str, str] | None]


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
        """By hour, and within one by falling quantity. Times in seconds since 1970, on the
        hour. Projects are those that the sessions belong to now."""
        self._usage.write()
        await self._database.flush()
        wanted = [
            usage.c.hour >= starting_on,
            usage.c.hour < ending_before,
            visible(usage.c.owner, caller, "accessible"),
        ]
        if project_id is not None:
            wanted.append(sessions.c.project_id == project_id)
        if session_id is not None:
            wanted.append(usage.c.session_id == session_id)
        group = (usage.c.hour, usage.c.event, usage.c.session_id, usage.c.owner, usage.c.base_model)
        rows = await self._database.read(
            select(
                *group,
                func.max(sessions.c.project_id).label("project_id"),
                *(
                    func.sum(usage.c[name]).label(name)
                    for name in ("count", "input_tokens", "cached_tokens", "output_tokens")
                ),
                func.sum(usage.c.accelerator_seconds).label("seconds"),
            )
            .join(sessions, sessions.c.id == usage.c.session_id, isouter=True)
            .where(*wanted)
            .group_by(*group)
        )
        quantities: defaultdict[_Key, int] = defaultdict(int)
        seconds: defaultdict[_Key, float] = defaultdict(float)
        for row in rows:
            where = (
                row["hour"],
                row["session_id"],
                row["project_id"] or "",
                row["owner"],
                row["base_model"],
            )
            for type_, quantity, spent in _told(row["event"], row):
                quantities[type_, where] += quantity
                seconds[type_, where] += spent
        events = [
            UsageEvent(
                hour=where[0],
                type=type_,
                session_id=where[1],
                project_id=where[2],
                owner=where[3],
                base_model=where[4],
                quantity=quantity,
                accelerator_seconds=seconds[type_, where],
            )
            for (type_, where), quantity in quantities.items()
            if quantity or seconds[type_, where]
        ]
        events.sort(key=lambda e: (e.hour, -e.quantity, e.session_id, e.base_model, e.type))
        ids = sorted({event.session_id for event in events})
        return UsageReport(events=events, metadata=await self._metadata(ids))

    async def _metadata(self, ids: Sequence[str]) -> dict[str, Mapping[str, str] | None]:
        rows = await self._database.read(
            select(sessions.c.id, sessions.c.user_metadata).where(sessions.c.id.in_(ids))
        )
        found = {row["id"]: text_metadata(row["user_metadata"]) for row in rows}
        return {session_id: found.get(session_id) for session_id in ids}


_Where = tuple[int, str, str, str, str]
_Key = tuple[EventType, _Where]


def _told(event: str, row: RowMapping) -> list[tuple[EventType, int, float]]:
    """What one kind of usage is in the SDK's words: (type, quantity, accelerator seconds)."""
    count, tokens, cached, sampled = (
        int(row[name]) for name in ("count", "input_tokens", "cached_tokens", "output_tokens")
    )
    seconds = float(row["seconds"])
    if event in _TRAINING:
        return [("training", tokens, seconds)]
    if event == "sample":
        return [
            ("sampling_prefill", tokens - cached, 0.0),
            ("sampling_prefill_cached", cached, 0.0),
            ("sampling_sample", sampled, seconds),
        ]
    if event in _CHECKPOINT:
        return [("checkpoint", count, seconds)]
    return [("training", 0, seconds)]  # publishing weights for a sampler
