"""The lines of the logs that concern a caller's runs and requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Literal

from fastapi import Query
from sqlalchemy import select

from gateway.api.dependencies import Access, AccessDep
from gateway.api.fields import Answer, Omitted, PathText
from gateway.api.routing import Router
from gateway.identifiers import unknown_run
from gateway.owners.auth.identity import visible
from gateway.storage.tables import sessions
from tandem.errors import UnknownRequest, UnknownRun, without_paths
from tandem.log_lines import LogFilter, LogLine, list_log_files, read_log_lines

router = Router("/api/tandem/v1", tag="Tandem")

Level = Literal["debug", "info", "warning", "error"]
_Name = Annotated[PathText | Omitted, Query(max_length=200)]


class LogEntry(Answer):
    """A line, mostly JSON. `log` is `gateway`, `agent` or a worker. `at` is in seconds since 1970.
    Text without a level counts as an error."""

    log: str
    at: float
    level: str
    text: str


class LogEntries(Answer):
    """`cut`: older lines may exist, beyond the limit or the bound of read bytes."""

    lines: list[LogEntry]
    cut: bool


class LogSummary(Answer):
    """A log. `bytes` include rotated copies. `written_at` is in seconds since 1970."""

    log: str
    run: str
    session: str
    model: str
    state: str
    bytes: int
    written_at: float


class LogSummaries(Answer):
    logs: list[LogSummary]


@router.operation("GET", "/logs", role="reader", overseen=True, errors=[UnknownRun, UnknownRequest])
async def log_lines(
    access: AccessDep,
    log: _Name = None,
    run: _Name = None,
    request: _Name = None,
    level: Annotated[Level, Query()] = "debug",
    since: Annotated[float, Query(ge=0, le=2**53)] = 0.0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 200,
) -> LogEntries:
    """Return the newest lines of gateway, agent and workers in the order of their times. Admins
    and maintainers see all, others the lines about their own sessions. Only admins see paths. Logs
    are read from their ends, up to a bound."""
    gateway, mine = access.gateway, await _sessions(access)
    if run is not None and mine is not None and run.partition(":")[0] not in mine:
        raise unknown_run(run)
    if request is not None:
        await access.request(request)
    wanted = LogFilter(
        log=log or "",
        run=run or "",
        request=request or "",
        level=level,
        since=since,
        sessions=mine,
        shared=gateway.settings.sharing.across_owners,
    )
    folder = gateway.settings.data_dir / "logs"
    found, cut = await asyncio.to_thread(read_log_lines, folder, wanted, limit=limit)
    whole = access.caller.role == "admin"
    return LogEntries(lines=[_entry(line, whole=whole) for line in found], cut=cut)


@router.operation("GET", "/logs/files", role="reader", overseen=True)
async def log_files(access: AccessDep) -> LogSummaries:
    """List the logs, the last written first. Admins and maintainers see all, others those
    of their workers."""
    gateway, mine = access.gateway, await _sessions(access)
    found = await asyncio.to_thread(list_log_files, gateway.settings.data_dir / "logs")
    states: Mapping[str, str] = {
        "gateway": "ready",
        "agent": "ready",
        **{worker.worker_id: worker.state for worker in gateway.processes.list_records()},
    }
    return LogSummaries(
        logs=[
            LogSummary.of(file, state=states.get(file.log, "ended"))
            for file in found
            if mine is None or file.session in mine
        ]
    )


async def _sessions(access: Access) -> frozenset[str] | None:
    """Return the caller's sessions, None for a caller that sees everything."""
    if access.caller.sees_all:
        return None
    query = select(sessions.c.id).where(visible(sessions.c.owner, access.caller, "owned"))
    await access.gateway.database.flush()
    rows = await access.gateway.database.read(query)
    return frozenset(row["id"] for row in rows)


def _entry(line: LogLine, *, whole: bool) -> LogEntry:
    return LogEntry.of(line, text=line.text if whole else without_paths(line.text))
