"""Device groups: their workers, waiting workers, and draining.

Another owner's things appear without a name, see `gateway.placement.occupancy`."""

from __future__ import annotations

import asyncio

from gateway.api.dependencies import CallerDep, GatewayDep
from gateway.api.fields import Answer, PathText
from gateway.api.routing import Router
from gateway.core import Gateway
from gateway.owners.auth.identity import Caller
from gateway.placement.groups import DeviceGroup
from gateway.placement.occupancy import applicants, occupants
from tandem.errors import UnknownGroup

router = Router("/api/tandem/v1", tag="Tandem")


class GroupWorker(Answer):
    """A worker on a group. `state`: awake, giving_way (it finishes its calls), falling_asleep,
    waking, waiting, asleep, or absent (a place without a process). `position` is its turn in the
    queue, from 1, or 0 if it does not wait. `seconds` is how long it has had the devices, or has
    waited. `expected_seconds` estimates the rest of the wait from recent switches. Another owner's
    worker shows only state and position."""

    state: str
    position: int
    worker: str
    kind: str
    owner: str
    session_id: str
    seconds: float
    expected_seconds: float
    reason: str
    device_seconds: float
    device_bytes: int
    host_bytes: int
    disk_bytes: int


class GroupOccupancy(Answer):
    """At most `awake` workers are awake at once (0: all). At most `most_workers` have a place (0:
    any number), and `placed` have one. `host` is for admins. `switch_seconds` is the recent
    duration of a switch: one worker falls asleep and another wakes. Of the caller's visible
    workers, `resident_bytes` are on the devices, `sleeping_bytes` in host memory and
    `spilled_bytes` in files, as of their last switches. `workers` lists the lease holders, then the
    waiting ones in turn, then the rest."""

    name: str
    host: str
    devices: list[str]
    roles: list[str]
    awake: int
    workers: list[GroupWorker]
    most_workers: int
    placed: int
    drained: bool
    policy: str
    switches: int
    switch_seconds: float
    resident_bytes: int
    sleeping_bytes: int
    spilled_bytes: int


class HostMemoryUse(Answer):
    """Workers of leased groups use `used_bytes` of host memory, switches in progress included, of
    `budget_bytes` (0: unlimited)."""

    budget_bytes: int
    used_bytes: int


class PlaceApplicant(Answer):
    """A run or a sampler that waits for places. Another owner's shows only its position."""

    position: int
    worker: str
    owner: str
    session_id: str
    reason: str


class GroupList(Answer):
    """`queue` waits for places, the next one first. `memory` is for admins, null for others."""

    groups: list[GroupOccupancy]
    memory: HostMemoryUse | None
    queue: list[PlaceApplicant]


@router.operation("GET", "/groups", role="reader")
async def list_groups(gateway: GatewayDep, caller: CallerDep) -> GroupList:
    """List the device groups, the lease holders and the queue."""
    return GroupList(
        groups=[_described(group, gateway, caller) for group in gateway.places.groups],
        memory=HostMemoryUse(budget_bytes=gateway.memory.budget, used_bytes=gateway.memory.used)
        if caller.role == "admin"
        else None,
        queue=[PlaceApplicant.of(each.for_caller(caller)) for each in applicants(gateway.places)],
    )


@router.operation(
    "POST", "/groups/{name}/drain", role="admin", audit="group_drain", errors=[UnknownGroup]
)
async def drain_group(name: PathText, gateway: GatewayDep, caller: CallerDep) -> GroupOccupancy:
    """Stop placing workers on a group, even after a restart of the gateway. Its idle workers fall
    asleep, and those that no run keeps end. Running work continues."""
    group = _group(name, gateway)
    await gateway.drain(group, drained=True)
    return _described(group, gateway, caller)


@router.operation(
    "DELETE", "/groups/{name}/drain", role="admin", audit="group_undrain", errors=[UnknownGroup]
)
async def undrain_group(name: PathText, gateway: GatewayDep, caller: CallerDep) -> GroupOccupancy:
    """Place workers on a group again."""
    group = _group(name, gateway)
    await gateway.drain(group, drained=False)
    return _described(group, gateway, caller)


def _group(name: str, gateway: Gateway) -> DeviceGroup:
    for group in gateway.places.groups:
        if group.name == name:
            return group
    known = ", ".join(group.name for group in gateway.places.groups)
    raise UnknownGroup(f"there is no group {name[:100]!r}; known: {known}")


def _described(group: DeviceGroup, gateway: Gateway, caller: Caller) -> GroupOccupancy:
    leases = gateway.leases.of(group.name)
    placed = gateway.places.on(group)
    now = asyncio.get_running_loop().time()
    workers = [each.for_caller(caller) for each in occupants(leases, placed, now=now)]
    return GroupOccupancy(
        name=group.name,
        host=group.host if caller.role == "admin" else "",
        devices=[str(device) for device in group.devices],
        roles=sorted(group.roles),
        awake=group.awake,
        workers=[
            GroupWorker.of(
                each,
                seconds=round(each.seconds, 1),
                expected_seconds=round(each.expected_seconds, 1),
                device_seconds=round(each.device_seconds, 1),
            )
            for each in workers
        ],
        most_workers=group.workers,
        placed=len(placed),
        drained=leases.drained,
        policy=leases.policy,
        switches=leases.switches.count,
        switch_seconds=round(leases.switches.seconds, 3),
        resident_bytes=sum(each.device_bytes for each in workers),
        sleeping_bytes=sum(each.host_bytes for each in workers),
        spilled_bytes=sum(each.disk_bytes for each in workers),
    )
