"""Memory of devices and host: room for workers, and ways to sleep.

On a group of cores, device and host have the same memory. A worker that falls asleep there frees
nothing, unless its state goes to disk or is dropped."""

from __future__ import annotations

from gateway.workers.overview import Overview
from gateway.workers.steps import SleepPlan
from gateway.workers.table import WorkerRow

_GIB = 2**30


# --- Devices --------------------------------------------------------------------------------------


def why_not_on_device(
    overview: Overview, row: WorkerRow, *, leaving: frozenset[str] = frozenset()
) -> str:
    """Return why a worker cannot have its devices beside the occupying rows, or "".

    Rows that are `leaving` count as asleep."""
    group = overview.group_of(row)
    if not group.leased:
        return ""
    awake, asleep = list[WorkerRow](), list[WorkerRow]()
    for each in overview.on(group):
        if each.key != row.key and each.has_process:
            (awake if each.occupies and each.key not in leaving else asleep).append(each)
    if len(awake) >= group.awake:
        return f"{len(awake)} workers are awake on group {group.name}, as many as it allows"
    if not group.device_bytes or not (awake or row.request.device_bytes):
        return ""
    if not row.request.device_bytes:
        return f"its need is unknown, so it needs group {group.name} alone"
    if any(not each.request.device_bytes for each in awake):
        return f"a worker of unknown need has group {group.name} alone"
    needs = sum(each.request.device_bytes + group.context_bytes for each in (row, *awake))
    left = sum(overview.left_on_device(each) for each in asleep)
    if needs + left <= group.device_bytes:
        return ""
    return (
        f"awake workers would need {gib(needs)} of a device's {gib(group.device_bytes)} on group "
        f"{group.name}, and sleepers have left {gib(left)} there"
    )


def lacks_device_bytes(overview: Overview, row: WorkerRow) -> bool:
    """Whether a worker does not fit beside the bytes that sleepers have left, even alone."""
    group, need = overview.group_of(row), row.request.device_bytes
    if not (group.leased and group.device_bytes and need):
        return False
    left = overview.left_on_devices[group.name]
    if row.has_process:
        left -= overview.left_on_device(row)
    return need + group.context_bytes + left > group.device_bytes


# --- The host -------------------------------------------------------------------------------------


def why_not_on_host(overview: Overview, row: WorkerRow) -> str:
    """Return why the host has no memory to wake a worker, or ""."""
    grows, budget = _growth(overview, row), overview.budgets.host_bytes
    if not budget or not grows or overview.host_bytes_in_use + grows <= budget:
        return ""
    return host_shortage(overview)


def host_shortage(overview: Overview) -> str:
    return (
        f"workers use {gib(overview.host_bytes_in_use)} of at most "
        f"{gib(overview.budgets.host_bytes)} of host memory (TANDEM_HOST_MEMORY_BYTES)"
    )


def _growth(overview: Overview, row: WorkerRow) -> int:
    """Return the host memory that a worker takes when it wakes, beyond its present bytes."""
    if not overview.group_of(row).on_host:
        return 0
    return max(0, overview.awake_bytes(row) - overview.host_bytes(row))


def sleepers_in_the_way(overview: Overview, row: WorkerRow) -> list[WorkerRow]:
    """Return the sleepers that may end so that a worker can wake, the least recently served
    first."""
    group = overview.group_of(row)
    asleep = [
        each for each in overview.rows.values() if each.state == "asleep" and each.key != row.key
    ]
    if why_not_on_host(overview, row):
        found = [each for each in asleep if overview.host_bytes(each)]
    else:
        here = [each for each in asleep if each.group == group.name]
        found = [each for each in here if overview.left_on_device(each) > group.context_bytes]
    return sorted(found, key=lambda each: overview.demand_of(each).served_at)


# --- Ways to sleep --------------------------------------------------------------------------------


def why_not_asleep(overview: Overview, row: WorkerRow) -> str:
    """Return why a job keeps its devices until it ends, or "". Other workers can sleep.

    The host suspends a job. Several processes were never suspended together."""
    if row.kind != "job":
        return ""
    if row.request.ranks > 1:
        return f"it has {row.request.ranks} processes, and only one process can be suspended"
    if why := overview.group_of(row).no_suspender:
        return why
    if overview.demand_of(row).keeps_devices:
        return "an attempt of it has ended while it was suspended"
    plans = sleep_plans(overview, row)
    return f"the host has no room for its state: {plans}" if isinstance(plans, str) else ""


def sleep_plans(
    overview: Overview, row: WorkerRow, *, following: WorkerRow | None = None
) -> tuple[SleepPlan, ...] | str:
    """Return the ways in which a worker can sleep, the best first, or the reason against all.

    `following` is the worker that wakes next. Its growth on the host is left free."""
    plans: list[SleepPlan] = []
    faults: list[str] = []
    ways = [_to_host(overview, row, following)]
    if row.kind != "job":
        ways.append(_dropped() if row.kind == "engine" else _to_disk(overview, row))
    for plan in ways:
        if isinstance(plan, str):
            faults.append(plan)
        else:
            plans.append(plan)
    return tuple(plans) or "; ".join(faults)


def _to_host(overview: Overview, row: WorkerRow, following: WorkerRow | None) -> SleepPlan | str:
    budget = overview.budgets.host_bytes
    if not budget:
        return SleepPlan("host")
    has, said = overview.host_bytes(row), overview.bytes_of(row)
    grows = _growth(overview, following) if following is not None else 0
    free = budget - (overview.host_bytes_in_use - has) - grows
    group = overview.group_of(row)
    if group.on_host:
        return SleepPlan("host") if has <= free else host_shortage(overview)
    if row.kind == "trainer":
        most = _grant(free, _state_bytes(overview, row))
    else:  # it gets no limit
        expected = said.host or _state_bytes(overview, row) or group.device_bytes
        if row.kind == "job":  # nobody measures it: its device, beside its own host memory
            expected = group.device_bytes and group.device_bytes + row.request.host_bytes
        most = (expected or free) if expected <= free else 0
    return SleepPlan("host", most) if most > 0 else host_shortage(overview)


def _to_disk(overview: Overview, row: WorkerRow) -> SleepPlan | str:
    reserved = sum(each.reserved_disk for each in overview.bytes.values())
    free = overview.budgets.disk_bytes - reserved
    most = _grant(free, _state_bytes(overview, row))
    if most > 0:
        return SleepPlan("disk", most)
    return f"the disk for its state has {gib(max(0, free))} free (TANDEM_SPILL_DIR)"


def _state_bytes(overview: Overview, row: WorkerRow) -> int:
    """Return a worker's bytes on all its devices, or 0 if they are unknown."""
    said, request = overview.bytes_of(row), row.request
    if overview.group_of(row).on_host:
        return said.device or request.host_bytes
    return said.device or request.device_bytes * request.ranks


def _dropped() -> SleepPlan:
    """An engine can always drop its weights and load them again."""
    return SleepPlan("drop")


def _grant(free: int, expected: int) -> int:
    """Return the bytes that a sleep may take, or 0 or less if there is no room.

    A worker of unknown size may take all. Another worker may take its size and half of the rest: it
    may have grown, and others may want to sleep at the same time."""
    if expected <= 0:
        return free
    return expected + (free - expected) // 2 if expected <= free else 0


def gib(size: int) -> str:
    """Literal example: "43.2 GiB"."""
    return f"{size / _GIB:.4g} GiB"
