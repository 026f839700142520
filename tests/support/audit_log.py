"""The audit log since the start of the tests. The gateway shows one UTC day, and midnight may
pass."""

from __future__ import annotations

import datetime as dt

import httpx

_FIRST = dt.datetime.now(dt.UTC).date()


def days_of_tests() -> list[dt.date]:
    last = dt.datetime.now(dt.UTC).date()
    return [_FIRST + dt.timedelta(days=n) for n in range((last - _FIRST).days + 1)]


def audit_log(client: httpx.Client, *, event_type: str = "all") -> list[dict]:
    """Return all entries, oldest first."""
    entries: list[dict] = []
    for day in days_of_tests():
        params = {"event_type": event_type, "day": day.isoformat()}
        entries += client.get("/api/v1/audit", params=params).raise_for_status().json()["entries"]
    return entries
