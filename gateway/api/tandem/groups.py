"""Device groups: their workers, waiting workers, and draining.

Another owner's worker shows only its state and position."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.api.dependencies import Access, AccessDep
from gateway.api.fields import Answer, PathText
from gateway.api.routing import Router
from gateway.owners.auth.identity import Caller
from gateway.workers.groups import WorkerGroup
from gateway.workers.standing import Standing, applicants, standings
from tandem.errors import UnknownGroup

router = Router("/api/tandem/v1", tag="Tandem")


class GroupWorker(Answer):
    """A worker on a group. `state`: starting, awake, giving_way (it finishes its calls),
    falling_asleep, asleep, waking, stopping, lost (nothing answers), waiting, or absent (a place
    without a process). `position` is its turn in the queue, from 1, or 0 if it does not wait.
    `seconds` is how long it has had the devices, or has waited. `expected_seconds` estimates the
    rest of the wait from recent switches. `name` is the run's. Another owner's worker shows only
    state and position."""

    state: str
    position: int
    worker: str
    name: str
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
    any number), and `placed` have one. Runs share the devices by `sharing` (exclusive, time_slice
    or mps), unless they ask for another value. `host` is for admins and maintainers.
    `switch_seconds` is the recent duration of a switch: one worker falls asleep and another wakes.
    Of the caller's visible workers, `resident_bytes` are on the devices, `sleeping_bytes` in host
    memory and `spilled_bytes` in files, as of their last switches. `workers` lists the lease
    holders, then the waiting ones in turn, then the rest."""

    name: str
    host: str
    devices: list[str]
    roles: list[str]
    sharing: str
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
    """Workers use `used_bytes` of host memory, switches in progress included, of `budget_bytes`
    (0: unlimited)."""

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
    """`queue` waits for places, the next one first. `memory` is for admins and maintainers, null
    for others."""

    groups: list[GroupOccupancy]
    memory: HostMemoryUse | None
    queue: list[PlaceApplicant]


@router.operation("GET", "/groups", role="reader", overseen=True)
async def list_groups(access: AccessDep) -> GroupList:
    """List the device groups, their workers, and the queue for places."""
    gateway, caller = access.gateway, access.caller
    overview = gateway.supervisor.overview()
    budget, used = overview.budgets.host_bytes, overview.host_bytes_in_use
    memory = HostMemoryUse(budget_bytes=budget, used_bytes=used)
    return GroupList(
        groups=[await _described(group, access) for group in gateway.groups()],
        memory=memory if caller.sees_all else None,
        queue=[_applicant(each, caller) for each in applicants(overview)],
    )


@router.operation(
    "POST",
    "/groups/{name}/drain",
    role="maintainer",
    overseen=True,
    audit="group_drain",
    errors=[UnknownGroup],
)
async def drain_group(name: PathText, access: AccessDep) -> GroupOccupancy:
    """Stop placing workers on a group, even after a restart of the gateway. Its idle workers fall
    asleep, and those that no run keeps end. Running work continues."""
    return await _drain(name, access, drained=True)


@router.operation(
    "DELETE",
    "/groups/{name}/drain",
    role="maintainer",
    overseen=True,
    audit="group_undrain",
    errors=[UnknownGroup],
)
async def undrain_group(name: PathText, access: AccessDep) -> GroupOccupancy:
    """Place workers on a group again."""
    return await _drain(name, access, drained=False)


async def _drain(name: str, access: Access, *, drained: bool) -> GroupOccupancy:
    groups = {group.name: group for group in access.gateway.groups()}
    if name not in groups:
        raise UnknownGroup(f"there is no group {name[:100]!r}; known: {', '.join(groups)}")
    await access.gateway.supervisor.drain(name, drained=drained)
    return await _described(groups[name], access)


async def _described(group: WorkerGroup, access: Access) -> GroupOccupancy:
    caller, supervisor = access.caller, access.gateway.supervisor
    overview, roster = supervisor.overview(), supervisor.roster
    found = standings(overview, overview.groups[group.name])
    seen = [each.bytes for each in found if caller.may_see(each.row.owner)]
    drained = overview.groups[group.name].drained
    keys = [each.row.key for each in found]  # of trainers, the ids of runs
    names = await access.gateway.run_records.names(keys, access.caller)
    return GroupOccupancy(
        name=group.name,
        host=group.host if caller.sees_all else "",
        devices=list(group.devices),
        roles=group.roles,
        sharing=group.sharing,
        awake=group.awake,
        workers=[_worker(each, caller, names) for each in found],
        most_workers=group.workers,
        placed=len(found),
        drained=drained,
        policy="eager" if drained else overview.settings.policy,
        switches=roster.switches[group.name],
        switch_seconds=round(overview.switch_seconds.get(group.name, 0.0), 3),
        resident_bytes=sum(each.device for each in seen),
        sleeping_bytes=sum(each.host for each in seen),
        spilled_bytes=sum(each.disk for each in seen),
    )


def _worker(standing: Standing, caller: Caller, names: Mapping[str, str]) -> GroupWorker:
    row, demand, used = standing.row, standing.demand, standing.bytes
    found = GroupWorker(
        state=standing.state,
        position=standing.position,
        worker=row.key,
        name=names.get(row.key, ""),
        kind=row.kind,
        owner=row.owner,
        session_id=row.session,
        seconds=round(standing.seconds, 1),
        expected_seconds=round(standing.expected_seconds, 1),
        reason=standing.reason,
        device_seconds=round(demand.used_seconds, 1),
        device_bytes=used.device,
        host_bytes=used.host,
        disk_bytes=used.disk,
    )
    return found if caller.may_see(row.owner) else found.only("state", "position")


def _applicant(standing: Standing, caller: Caller) -> PlaceApplicant:
    row = standing.row
    found = PlaceApplicant(
        position=standing.position,
        worker=row.key,
        owner=row.owner,
        session_id=row.session,
        reason=standing.reason,
    )
    return found if caller.may_see(row.owner) else found.only("position")
