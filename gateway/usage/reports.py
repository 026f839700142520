"""Usage as the SDK's billing calls report it: by hour, session, base model and kind.

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

_CHECKPOINT = frozenset({"save_weights", "save_weights_for_sampler", "save_weights_external"})


@dataclass(frozen=True)
class UsageEvent:
    """One hour (`hour` in seconds since 1970) of one session with one base model. `quantity` is
    in tokens, for a checkpoint in saves. The accelerator seconds of a sample are reported once,
    with its sampled tokens."""

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
    """`metadata` has the user metadata of each session that occurs."""

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
        """Report the usage that the caller may see, by hour, the largest quantity of each first.

        Times are in seconds since 1970, on the hour. A session counts for the project to which
        it belongs now.
        """
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
                func.coalesce(func.max(sessions.c.project_id), "").label("project_id"),
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
        totals: defaultdict[_Key, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for row in rows:
            for type_, quantity, seconds in _in_sdk_terms(row):
                key = (
                    row["hour"],
                    type_,
                    row["session_id"],
                    row["project_id"],
                    row["owner"],
                    row["base_model"],
                )
                totals[key] = (totals[key][0] + quantity, totals[key][1] + seconds)
        events = [UsageEvent(*key, *total) for key, total in totals.items() if any(total)]
        events.sort(key=lambda e: (e.hour, -e.quantity, e.session_id, e.base_model, e.type))
        ids = sorted({event.session_id for event in events})
        return UsageReport(events=events, metadata=await self._metadata(ids))

    async def _metadata(self, ids: Sequence[str]) -> dict[str, Mapping[str, str] | None]:
        rows = await self._database.read(
            select(sessions.c.id, sessions.c.user_metadata).where(sessions.c.id.in_(ids))
        )
        found = {row["id"]: text_metadata(row["user_metadata"]) for row in rows}
        return {session_id: found.get(session_id) for session_id in ids}


_Key = tuple[int, EventType, str, str, str, str]


def _in_sdk_terms(row: RowMapping) -> list[tuple[EventType, int, float]]:
    """Translate one kind of usage: (type, quantity, accelerator seconds)."""
    tokens, cached, seconds = int(row["input_tokens"]), int(row["cached_tokens"]), row["seconds"]
    if row["event"] == "sample":
        return [
            ("sampling_prefill", tokens - cached, 0.0),
            ("sampling_prefill_cached", cached, 0.0),
            ("sampling_sample", int(row["output_tokens"]), seconds),
        ]
    if row["event"] in _CHECKPOINT:
        return [("checkpoint", int(row["count"]), seconds)]
    return [("training", tokens, seconds)]  # also publishing weights, which has no tokens
