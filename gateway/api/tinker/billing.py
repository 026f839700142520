"""Usage in the SDK's form. There are no prices, so the fields of costs and rates are left out."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Literal

from fastapi import Query

from gateway.api.dependencies import AccessDep
from gateway.api.fields import Answer, Moment, ProjectFilter, Time, UserMetadata
from gateway.api.routing import Router
from gateway.owners.auth.identity import urn_of
from gateway.owners.usage.meter import HOUR
from gateway.owners.usage.reports import UsageEvent
from tandem.errors import InvalidRequest

_LONGEST = dt.timedelta(days=14)

router = Router("/api/v1/billing/usage", tag="SDK")


class TokensUsed(Answer):
    type: Literal["training", "sampling_prefill", "sampling_sample"]
    token_count: int
    cached: bool | None = None


class CheckpointsSaved(Answer):
    type: Literal["checkpoint"]
    count: int


class UsageOfHour(Answer):
    """`accelerator_seconds` is Tandem's own: the time of workers."""

    bucket_start: Time
    bucket_end: Time
    base_model: str
    user_id: str
    user_name: str
    session_id: str
    project_id: str | None
    event_info: TokensUsed | CheckpointsSaved
    accelerator_seconds: float


class SessionNotes(Answer):
    user_metadata: UserMetadata


class UsageEvents(Answer):
    data: list[UsageOfHour]
    sessions: dict[str, SessionNotes]


class StorageOfProject(Answer):
    project_id: str | None
    org_user_urn: str
    user_name: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float


class CheckpointStorage(Answer):
    data: list[StorageOfProject]


@router.operation(
    "GET",
    "/events",
    role="reader",
    rules=["The window begins and ends on the hour, and has 14 days at most."],
)
async def usage_events(
    access: AccessDep,
    starting_on: Annotated[Moment, Query()],
    ending_before: Annotated[Moment, Query()],
    project_id: Annotated[ProjectFilter, Query()] = None,
    session_id: Annotated[ProjectFilter, Query()] = None,
) -> UsageEvents:
    """Return the window's usage by hour."""
    _check_window(starting_on, ending_before)
    report = await access.gateway.usage_reports.events(
        access.caller,
        starting_on=round(starting_on.timestamp()),
        ending_before=round(ending_before.timestamp()),
        project_id=project_id,
        session_id=session_id,
    )
    return UsageEvents(
        data=[_event(event) for event in report.events],
        sessions={s: SessionNotes(user_metadata=notes) for s, notes in report.metadata.items()},
    )


@router.operation("GET", "/checkpoints/current", role="reader")
async def checkpoint_storage(
    access: AccessDep, project_id: Annotated[ProjectFilter, Query()] = None
) -> CheckpointStorage:
    """Return the current checkpoints and their bytes, by project and owner."""
    items = await access.gateway.checkpoints.storage_use(access.caller, project_id=project_id)
    return CheckpointStorage(
        data=[
            StorageOfProject(
                project_id=item.project_id or None,
                org_user_urn=urn_of(item.owner),
                user_name=item.owner,
                checkpoint_count=item.count,
                size_bytes=item.bytes,
                size_gigabytes=item.bytes / 1e9,
            )
            for item in items
        ],
    )


def _check_window(starting_on: dt.datetime, ending_before: dt.datetime) -> None:
    for name, moment in (("starting_on", starting_on), ("ending_before", ending_before)):
        if moment.timestamp() % HOUR:
            raise InvalidRequest(
                f"{name} is {moment.isoformat()}; it must be on the hour (UTC), such as "
                "2026-07-13T00:00:00Z"
            )
    if starting_on >= ending_before:
        raise InvalidRequest("starting_on must be before ending_before")
    if ending_before - starting_on > _LONGEST:
        raise InvalidRequest("the window is longer than 14 days; ask for it in parts")
    if starting_on > dt.datetime.now(dt.UTC):
        raise InvalidRequest("starting_on is in the future; nothing was used there yet")


def _event(event: UsageEvent) -> UsageOfHour:
    return UsageOfHour.of(
        event,
        bucket_start=event.hour,
        bucket_end=event.hour + HOUR,
        user_id=urn_of(event.owner),
        user_name=event.owner,
        project_id=event.project_id or None,
        event_info=_info(event),
        accelerator_seconds=round(event.accelerator_seconds, 6),
    )


def _info(event: UsageEvent) -> TokensUsed | CheckpointsSaved:
    match event.type:
        case "sampling_prefill" | "sampling_prefill_cached" as kind:
            cached = kind == "sampling_prefill_cached"
            return TokensUsed(type="sampling_prefill", cached=cached, token_count=event.quantity)
        case "checkpoint":
            return CheckpointsSaved(type="checkpoint", count=event.quantity)
        case kind:
            return TokensUsed(type=kind, token_count=event.quantity)
