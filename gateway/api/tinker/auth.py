"""Tokens, information about a key, and the audit log in the SDK's form."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Literal

from fastapi import Query
from pydantic import JsonValue

from gateway.api.dependencies import AccessDep
from gateway.api.fields import Answer, AuthRefusal, Day, Omitted, Time
from gateway.api.routing import Router
from gateway.owners.auth.audit import Entry
from gateway.owners.auth.identity import ORGANIZATION
from tandem.errors import PermissionDenied, Unauthenticated

router = Router("/api/v1/auth", tag="SDK", refusal=AuthRefusal)
audit_router = Router("/api/v1", tag="SDK")

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class Token(Answer):
    jwt: str


class OwnKey(Answer):
    key_id: int
    name: str
    note: str
    details: dict[str, dict[str, str]]


class AuditEntry(Answer):
    """`event_details` has the actor, target, address, status and further details of the action. The
    later fields are for older SDKs, about checkpoints."""

    timestamp: Time
    event: str
    event_details: dict[str, JsonValue]
    tinker_path: str | None
    model_id: str | None


class AuditLogPage(Answer):
    entries: list[AuditEntry]


@router.operation("POST", "/token", role="reader", audit=None)
async def exchange_token(access: AccessDep) -> Token:
    """Exchange the key for a JWT, which the SDK then presents."""
    return Token(jwt=access.gateway.identity.issue(access.caller))


@router.operation("GET", "/apikey/me", role="reader")
async def own_key(access: AccessDep) -> OwnKey:
    """Describe the key. `tinker auth login` calls this before storing a key. The owner's name
    replaces the email address."""
    key = access.gateway.keys.get(access.caller.key_id)
    if key is None:  # replaced since the request arrived
        raise Unauthenticated("the API key is no longer valid")
    return OwnKey(
        key_id=key.number,
        name=key.name or f"{key.owner}-{key.id}",
        note=f"role {key.role}",
        details={
            "org_details": {"name": ORGANIZATION},
            "user_details": {"email": access.caller.owner},
        },
    )


@router.operation(
    "DELETE",
    "/apikey/me",
    role="reader",  # every holder of a key may give it up
    audit="apikey_delete",
    errors=[PermissionDenied],
)
async def delete_own_key(access: AccessDep) -> None:
    """Revoke the caller's key, or the key of its token. The local key cannot be deleted, because
    the commands on this machine use it."""
    access.audit.note(access.caller.key_id)
    key = access.gateway.keys.get(access.caller.key_id)
    if key is not None and key.local:
        raise PermissionDenied(
            "this is the local key of the gateway, so it cannot be deleted here; to replace it, "
            "stop the gateway, remove the file api_key in its data directory (or change "
            "TANDEM_API_KEY) and start it again"
        )
    await access.gateway.keys.revoke(access.caller.key_id)


@audit_router.operation("GET", "/audit", role="admin")
async def audit_log(
    access: AccessDep,
    event_type: Annotated[EventType, Query()] = "all",
    day: Annotated[Day | Omitted, Query()] = None,
) -> AuditLogPage:
    """Return the audit log of a day (UTC; today by default), oldest first."""
    today = dt.datetime.now(dt.UTC).date()
    found = await access.gateway.audit.of_day(day=day or today, event_type=event_type)
    return AuditLogPage(entries=[_entry(entry) for entry in found])


def _entry(entry: Entry) -> AuditEntry:
    path = entry.target if entry.target.startswith("tinker://") else None
    details = {name: getattr(entry, name) for name in ("actor", "target", "address", "status")}
    return AuditEntry(
        timestamp=entry.at,
        event=entry.action,
        event_details=details | dict(entry.detail),
        tinker_path=path,
        model_id=path.split("/")[2] if path else None,
    )
