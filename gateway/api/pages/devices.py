"""Devices: groups with their holders, waiting workers, memory, and lanes over time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from gateway.api.pages.lanes import WorkerNames, charts, read_events, time_ticks, worker_names
from gateway.api.pages.routing import PageDep, PageRouter
from gateway.workers.groups import WorkerGroup
from gateway.workers.standing import Standing, applicants, standings

router = PageRouter()


@dataclass(frozen=True)
class DeviceWorker:
    """A worker on a group or in the queue. Another owner's has no `about`. `part` is its part of
    the devices' memory, from 0 to 100, and begins at `x`."""

    name: str
    run: str
    state: str
    position: int
    about: Standing | None
    x: float = 0.0
    part: float = 0.0


@dataclass(frozen=True)
class DeviceGroup:
    """`bytes` is the memory of all its devices, 0 if unknown, and `used` the known part in use."""

    group: WorkerGroup
    bytes: int
    used: int
    workers: Sequence[DeviceWorker]


@router.operation("GET", "/devices", role="reader", overseen=True)
async def devices_page(page: PageDep, hours: Annotated[int, Query(ge=1, le=168)] = 1) -> Response:
    """Show the device groups. Admins and maintainers see all workers, others the names of
    their own."""
    gateway, caller, now = page.gateway, page.caller, time.time()
    overview, since = gateway.supervisor.overview(), now - hours * 3600
    events = await read_events(gateway.database, since=since, until=now)
    sessions = {row["session_id"] for row in events if caller.may_see(row["owner"])}
    sessions.update(row.session for row in overview.rows.values() if caller.may_see(row.owner))
    names = await worker_names(gateway.database, caller, sessions)
    groups = [overview.groups[group.name] for group in gateway.groups()]
    shown = [_group(each, standings(overview, each), names) for each in groups]
    queue = [_worker(each, names) for each in applicants(overview)]

    def draw() -> Response:
        return page.render(
            "devices.html",
            groups=shown,
            queue=queue,
            charts=charts(events, names, since=since, now=now),
            ticks=time_ticks(since, now),
            hours=hours,
        )

    return await page.draw(draw)


def _group(group: WorkerGroup, found: Sequence[Standing], names: WorkerNames) -> DeviceGroup:
    whole = group.device_bytes * (1 if group.on_host else max(1, len(group.devices)))
    workers, x, used = list[DeviceWorker](), 0.0, 0
    for each in found:
        worker = _worker(each, names)
        size = each.bytes.device if worker.about else 0
        part = 100 * min(1.0, size / whole) if whole else 0.0
        workers.append(replace(worker, x=round(x, 2), part=round(part, 2)))
        x, used = x + part, used + size
    return DeviceGroup(group, whole, used, workers)


def _worker(standing: Standing, names: WorkerNames) -> DeviceWorker:
    row = standing.row
    name, run = names.of(row.key, row.kind, row.owner)
    return DeviceWorker(
        name=name,
        run=run,
        state=standing.state.replace("_", " "),
        position=standing.position,
        about=standing if names.caller.may_see(row.owner) else None,
    )
