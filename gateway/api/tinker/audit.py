"""The audit log, as the SDK reads it."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Literal

from fastapi import Query
from pydantic import JsonValue

from gateway.api.dependencies import GatewayDep
from gateway.api.fields import Answer, Day, Omitted, Time
from gateway.api.routing import Router
from gateway.auth.audit import Entry

router = Router("/api/v1", tag="SDK")

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class AuditEntry(Answer):
    """`event_details` has the actor, the target, the address, the status, and what the action
    notes beside them. The fields after it are those that older SDKs read of checkpoints."""

    timestamp: Time
    event: str
    event_details: dict[str, JsonValue]
    tinker_path: str | None
    model_id: str | None


class AuditLogPage(Answer):
    entries: list[AuditEntry]


@router.operation("GET", "/audit", role="admin")
async def audit_log(
    gateway: GatewayDep,
    event_type: Annotated[EventType, Query()] = "all",
    day: Annotated[Day | Omitted, Query()] = None,
) -> AuditLogPage:
    """Return the audit log of a day (UTC; today by default), oldest first."""
    entries = await gateway.audit.of_day(
        day=day or dt.datetime.now(dt.UTC).date(), event_type=event_type
    )
    return AuditLogPage(entries=[_entry(entry) for entry in entries])


def _entry(entry: Entry) -> AuditEntry:
    path = entry.target if entry.target.startswith("tinker://") else None
    return AuditEntry(
        timestamp=entry.at,
        event=entry.action,
        event_details={
            "actor": entry.actor,
            "target": entry.target,
            "address": entry.address,
            "status": entry.status,
            **entry.detail,
        },
        tinker_path=path,
        model_id=path.removeprefix("tinker://").partition("/")[0] if path else None,
    )
