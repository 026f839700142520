"""Devices: groups with their holders, waiting workers, memory, and lanes over time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from gateway.api.pages.lanes import WorkerNames, charts, read_events, worker_names
from gateway.api.pages.routing import PageDep, PageRouter
from gateway.workers.groups import WorkerGroup
from gateway.workers.standing import Standing, applicants, standings

router = PageRouter()

_HOUR = 3600.0


@dataclass(frozen=True)
class DeviceWorker:
    """A worker on a group or in the queue. Another owner's has no name, reason or bytes. `part` is
    its part of the devices' memory, from 0 to 100."""

    name: str
    run: str
    kind: str
    owner: str
    state: str
    position: int
    seconds: float
    expected_seconds: float
    reason: str
    device_bytes: int
    host_bytes: int
    x: float
    part: float


@dataclass(frozen=True)
class DeviceGroup:
    """`bytes` is the memory of all its devices, 0 if unknown."""

    name: str
    devices: Sequence[str]
    on_host: bool
    drained: bool
    awake: int
    bytes: int
    workers: Sequence[DeviceWorker]


@router.operation("GET", "/devices", role="reader")
async def devices_page(page: PageDep, hours: Annotated[int, Query(ge=1, le=168)] = 1) -> Response:
    """Show the device groups. An admin sees all workers, others the names of their own."""
    gateway, caller, now = page.gateway, page.caller, time.time()
    overview, since = gateway.supervisor.overview(), now - hours * _HOUR
    events = await read_events(gateway.database, since=since, until=now)
    sessions = {row["session_id"] for row in events if caller.may_see(row["owner"])}
    sessions.update(row.session for row in overview.rows.values() if caller.may_see(row.owner))
    names = await worker_names(gateway.database, caller, sessions)
    groups = [overview.groups[group.name] for group in gateway.groups()]
    shown = [_group(each, standings(overview, each), names) for each in groups]
    queue = [_worker(each, names, x=0.0, whole=0) for each in applicants(overview)]

    def draw() -> Response:
        return page.render(
            "devices.html",
            groups=shown,
            queue=queue,
            charts=charts(events, names, since=since, now=now),
            hours=hours,
        )

    return await page.draw(draw)


def _group(group: WorkerGroup, found: Sequence[Standing], names: WorkerNames) -> DeviceGroup:
    whole = group.device_bytes * (1 if group.on_host else max(1, len(group.devices)))
    workers, x = list[DeviceWorker](), 0.0
    for each in found:
        workers.append(_worker(each, names, x=x, whole=whole))
        x += workers[-1].part
    return DeviceGroup(
        name=group.name,
        devices=group.devices,
        on_host=group.on_host,
        drained=group.drained,
        awake=group.awake,
        bytes=whole,
        workers=workers,
    )


def _worker(standing: Standing, names: WorkerNames, *, x: float, whole: int) -> DeviceWorker:
    row, seen = standing.row, names.caller.may_see(standing.row.owner)
    name, run = names.of(row.key, row.kind, row.owner)
    used = standing.bytes.device if seen else 0
    return DeviceWorker(
        name=name,
        run=run,
        kind=row.kind if seen else "",
        owner=row.owner if seen else "",
        state=standing.state.replace("_", " "),
        position=standing.position,
        seconds=standing.seconds if seen else 0.0,
        expected_seconds=standing.expected_seconds if seen else 0.0,
        reason=standing.reason if seen else "",
        device_bytes=used,
        host_bytes=standing.bytes.host if seen else 0,
        x=round(x, 2),
        part=round(100 * min(1.0, used / whole), 2) if whole else 0.0,
    )
