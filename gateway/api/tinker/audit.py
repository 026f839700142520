"""The audit log, as the SDK reads it."""

from __future__ import annotations

import datetime as dt
from typing import Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.times import Day
from gateway.api.wire import gateway_of, iso, json_response, parse_query
from gateway.auth.audit import Entry


class AuditQuery(BaseModel):
    event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all"
    day: Day | None = None


async def audit_log(request: Request) -> Response:
    """The audit log of a day (UTC; today where none is named), oldest first. For admins."""
    query = parse_query(AuditQuery, request)
    entries = await gateway_of(request).audit.of_day(
        day=query.day or dt.datetime.now(dt.UTC).date(), event_type=query.event_type
    )
    return json_response({"entries": [_entry(entry) for entry in entries]})


def _entry(entry: Entry) -> dict[str, object]:
    """The fields beside `event_details` are those that older SDKs read of checkpoints."""
    path = entry.target if entry.target.startswith("tinker://") else None
    return {
        "timestamp": iso(entry.at),
        "event": entry.action,
        "event_details": {
            "actor": entry.actor,
            "target": entry.target,
            "address": entry.address,
            "status": entry.status,
            **entry.detail,
        },
        "tinker_path": path,
        "model_id": path.removeprefix("tinker://").partition("/")[0] if path else None,
    }
