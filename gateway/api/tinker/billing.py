"""What was used, in the SDK's form. There are no prices here: costs and rates are null."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.times import Moment
from gateway.api.wire import caller_of, gateway_of, iso, json_response, parse_query
from gateway.auth.identity import urn_of
from gateway.usage.meter import HOUR
from gateway.usage.reports import UsageEvent
from tandem.errors import InvalidRequest

_LONGEST = dt.timedelta(days=14)
_GIGABYTE = 1e9

ProjectFilter = Annotated[str | None, Field(max_length=200)]


class UsageQuery(BaseModel):
    starting_on: Moment
    ending_before: Moment
    project_id: ProjectFilter = None
    session_id: ProjectFilter = None


class StorageQuery(BaseModel):
    project_id: ProjectFilter = None


async def usage_events(request: Request) -> Response:
    """The window's usage by hour. `accelerator_seconds` is ours: those of workers."""
    query = parse_query(UsageQuery, request)
    _check_window(query)
    report = await gateway_of(request).usage_reports.events(
        caller_of(request),
        starting_on=round(query.starting_on.timestamp()),
        ending_before=round(query.ending_before.timestamp()),
        project_id=query.project_id,
        session_id=query.session_id,
    )
    return json_response(
        {
            "data": [_event(event) for event in report.events],
            "sessions": {
                session_id: {"user_metadata": metadata}
                for session_id, metadata in report.metadata.items()
            },
            "cost_data_through": None,
        }
    )


async def checkpoint_storage(request: Request) -> Response:
    """How many checkpoints there are now, and their bytes, by project and owner."""
    query = parse_query(StorageQuery, request)
    items = await gateway_of(request).checkpoints.storage_use(
        caller_of(request), project_id=query.project_id
    )
    return json_response(
        {
            "effective_rate_usd_per_gigabyte_month": None,
            "data": [
                {
                    "project_id": item.project_id or None,
                    "org_user_urn": urn_of(item.owner),
                    "user_email": None,
                    "user_name": item.owner,
                    "checkpoint_count": item.count,
                    "size_bytes": item.bytes,
                    "size_gigabytes": item.bytes / _GIGABYTE,
                    "estimated_monthly_cost_usd": None,
                }
                for item in items
            ],
        }
    )


def _check_window(query: UsageQuery) -> None:
    """Raises `InvalidRequest`."""
    for name, time in (
        ("starting_on", query.starting_on),
        ("ending_before", query.ending_before),
    ):
        if time.timestamp() % HOUR:
            raise InvalidRequest(
                f"{name} is {time.isoformat()}; it must be on the hour (UTC), such as "
                "2026-07-13T00:00:00Z"
            )
    if query.starting_on >= query.ending_before:
        raise InvalidRequest("starting_on must be before ending_before")
    if query.ending_before - query.starting_on > _LONGEST:
        raise InvalidRequest("the window is longer than 14 days; ask for it in parts")
    if query.starting_on > dt.datetime.now(dt.UTC):
        raise InvalidRequest("starting_on is in the future; nothing was used there yet")


def _event(event: UsageEvent) -> dict[str, object]:
    return {
        "bucket_start": iso(event.hour),
        "bucket_end": iso(event.hour + HOUR),
        "base_model": event.base_model,
        "user_id": urn_of(event.owner),
        "user_name": event.owner,
        "session_id": event.session_id,
        "project_id": event.project_id or None,
        "estimated_cost_usd": None,
        "effective_rate_usd_per_million_tokens": None,
        "effective_rate_usd_per_gigabyte_month": None,
        "event_info": _info(event),
        "accelerator_seconds": round(event.accelerator_seconds, 6),
    }


def _info(event: UsageEvent) -> dict[str, object]:
    match event.type:
        case "sampling_prefill" | "sampling_prefill_cached":
            return {
                "type": "sampling_prefill",
                "cached": event.type == "sampling_prefill_cached",
                "token_count": event.quantity,
            }
        case "checkpoint":
            return {"type": "checkpoint", "count": event.quantity}
        case _:
            return {"type": event.type, "token_count": event.quantity}
