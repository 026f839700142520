"""Turns: placed workers of a group take turns on its devices.

A worker keeps its devices until another worker needs them more. Then it yields: it admits no new
call, and sleeps when its last call ends. The next worker wakes only when the bytes and the number
of occupying rows allow it. So a worker keeps its devices until it has answered that it sleeps. A
job that cannot be suspended keeps them until it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gateway.workers.groups import WorkerGroup
from gateway.workers.memory import (
    lacks_device_bytes,
    sleep_plans,
    sleepers_in_the_way,
    why_not_asleep,
    why_not_on_device,
    why_not_on_host,
)
from gateway.workers.overview import Overview
from gateway.workers.steps import (
    AskToYield,
    Decision,
    KeepAwake,
    PutToSleep,
    StartWorker,
    StopWorker,
    WakeWorker,
)
from gateway.workers.table import WorkerRow

ROUND_TRIP = 0.02
"""Seconds from an answer to the client's next request."""
_SWITCHES_PER_QUANTUM = 10
"""A quantum is at least ten switches, so that busy workers spend a tenth of it on them."""
_STEPS_PER_QUANTUM = 1.5
"""The length of a step varies, so a quantum is longer than the last one."""
_SHARE_OF_WAIT = 0.25
"""The longest quantum for steps, as a share of the longest wait."""


def take_turns(decision: Decision, group: WorkerGroup) -> None:
    """Decide which workers of one group wake, yield and sleep."""
    _admit(decision, group)
    if group.leased:
        _evict(decision, group)
        _ask_to_yield(decision, group)
        _put_to_sleep(decision, group)


# --- The queue ------------------------------------------------------------------------------------


def queue(overview: Overview, group: WorkerGroup) -> list[WorkerRow]:
    """Return the rows whose calls wait for the devices of a group, the next one first.

    Rows that have waited for the longest wait come first, the oldest before others. Then come
    higher priority, the owner with the smallest share of the devices, and the row that was served
    least recently."""
    waiting = [
        row
        for row in overview.on(group)
        if row.state in ("placed", "asleep")
        and row.ends_as != "gone"
        and row.key not in overview.busy
        and overview.demand_of(row).waiting
        and overview.demand_of(row).rests_until <= overview.now
    ]
    return sorted(waiting, key=lambda row: _rank(overview, row))


def _rank(overview: Overview, row: WorkerRow) -> tuple[float, ...]:
    demand = overview.demand_of(row)
    if is_overdue(overview, row):
        return (0, demand.waiting_since, 0, 0, 0)
    share = overview.shares.get(row.owner, 0.0)
    return (1, -row.request.priority, share, demand.served_at, demand.waiting_since)


def is_overdue(overview: Overview, row: WorkerRow) -> bool:
    """Whether the calls of a row have waited for the longest wait."""
    return overview.now >= _overdue_at(overview, row)


def _overdue_at(overview: Overview, row: WorkerRow) -> float:
    return overview.demand_of(row).waiting_since + overview.settings.max_wait


def why_not_start(overview: Overview, row: WorkerRow) -> str:
    """Say why no process may start for a row now, or "" if one may."""
    group = overview.group_of(row)
    if (launcher := group.launcher_of(row.request.kind)) in overview.silent:
        return f"the {launcher} of group {group.name} does not answer"
    if not group.host:
        return ""
    if (starting := overview.starting[group.host]) < overview.budgets.starts:
        return ""
    return f"{starting} workers are starting on {group.host}"


def _may_begin(overview: Overview, row: WorkerRow) -> bool:
    return row.state == "asleep" or not why_not_start(overview, row)


# --- Waking ---------------------------------------------------------------------------------------


def _admit(decision: Decision, group: WorkerGroup) -> None:
    """Start or wake workers in turn, as long as the next one fits."""
    for row in decision.overview.on(group):
        demand = decision.overview.demand_of(row)
        if _is_awake(decision.overview, row) and demand.waiting and not demand.yielding:
            decision.admit(row)  # its calls began to wait during another step
    for row in queue(decision.overview, group):
        overview = decision.overview
        if not _may_begin(overview, row):
            continue  # it waits for a process, not for the devices
        if lacks_device_bytes(overview, row):
            continue  # it waits until a sleeper ends
        if why_not_on_device(overview, row) or _no_host_room(overview, row):
            break
        if row.state == "placed":
            decision.take(StartWorker(row.key), row.moved("starting", at=overview.now))
        else:
            decision.take(WakeWorker(row.key), row.moved("waking", at=overview.now))


def _no_host_room(overview: Overview, row: WorkerRow) -> bool:
    """Whether a worker waits for host memory. After the longest wait, it waits only while a
    sleeper's end or a step under way may free some."""
    if not why_not_on_host(overview, row):
        return False
    under_way = any(overview.rows[key].has_process for key in overview.busy)
    return under_way or not is_overdue(overview, row) or bool(sleepers_in_the_way(overview, row))


def _evict(decision: Decision, group: WorkerGroup) -> None:
    """End a sleeper if an overdue worker needs its memory."""
    overview = decision.overview
    blocked = [
        row
        for row in queue(overview, group)
        if _may_begin(overview, row)
        and (lacks_device_bytes(overview, row) or _no_host_room(overview, row))
    ]
    for row in blocked:
        if not is_overdue(overview, row) or not (sleepers := sleepers_in_the_way(overview, row)):
            continue
        if any(sleeper.key in overview.busy for sleeper in sleepers):
            break  # a sleeper ends already
        decision.end(StopWorker(sleepers[0].key, "another worker needs its memory"))
        return
    for row in blocked:
        decision.look_at(_overdue_at(overview, row))


# --- Yielding -------------------------------------------------------------------------------------


def _ask_to_yield(decision: Decision, group: WorkerGroup) -> None:
    """Ask workers to yield to waiting ones. If nobody waits, let yielding workers go on."""
    overview = decision.overview
    waiting = _waiting_for_devices(overview, group)
    awake = [
        row
        for row in overview.on(group)
        if _is_awake(overview, row) and not why_not_asleep(overview, row)
    ]
    if not waiting:
        for row in awake:
            demand = overview.demand_of(row)
            if demand.yielding and not demand.idle:
                decision.admit(row)
        return
    leaving = frozenset(row.key for row in overview.on(group) if _is_leaving(overview, row))
    due = sorted((_yields_at(overview, row, waiting), row.key) for row in awake)
    woken: list[WorkerRow] = []
    for row in waiting:
        imagined = overview.with_rows(woken)
        while why_not_on_device(imagined, row, leaving=leaving):
            found = _next_to_yield(overview, row, due, leaving)
            if found is None:
                decision.look_at(_overdue_at(overview, row))
                for at, key in due:
                    if key not in leaving:
                        decision.look_at(at)
                        decision.look_at(_levels_at(overview, row, overview.rows[key]))
                return
            leaving |= {found}
            decision.steps.append(AskToYield(found))
            holder = overview.rows[found]
            yielding = replace(overview.demand_of(holder), yielding=True)
            decision.overview = decision.overview.with_demand(holder, yielding)
        woken.append(row.moved("starting" if row.state == "placed" else "waking", at=overview.now))


def _waiting_for_devices(overview: Overview, group: WorkerGroup) -> list[WorkerRow]:
    """Return the waiting rows for which other workers can make room."""
    return [
        row
        for row in queue(overview, group)
        if _may_begin(overview, row) and not lacks_device_bytes(overview, row)
    ]


def _is_awake(overview: Overview, row: WorkerRow) -> bool:
    return row.state == "awake" and row.key not in overview.busy


def _is_leaving(overview: Overview, row: WorkerRow) -> bool:
    gives_up = row.state in ("falling_asleep", "stopping")
    return gives_up or (row.state == "awake" and overview.demand_of(row).yielding)


def _next_to_yield(
    overview: Overview,
    waiter: WorkerRow,
    due: Sequence[tuple[float, str]],
    leaving: frozenset[str],
) -> str | None:
    for at, key in due:
        if at > overview.now:
            return None
        holder = overview.rows[key]
        idle = not overview.demand_of(holder).uses
        if key not in leaving and (idle or _goes_before(overview, waiter, holder)):
            return key
    return None


def _goes_before(overview: Overview, waiter: WorkerRow, holder: WorkerRow) -> bool:
    """Whether a waiting worker is next if a busy one yields to it."""
    again = replace(overview.demand_of(holder), waiting_since=overview.now, served_at=overview.now)
    imagined = overview.with_demand(holder, again)
    return _rank(imagined, waiter) <= _rank(imagined, holder)


def _levels_at(overview: Overview, waiter: WorkerRow, holder: WorkerRow) -> float:
    """Return the time at which a busy holder has used as much as the owner of a waiting worker. It
    yields then, if it has kept its devices for its quantum."""
    lead = overview.shares.get(waiter.owner, 0.0) - overview.shares.get(holder.owner, 0.0)
    if lead <= 0 or waiter.request.priority < holder.request.priority:
        return math.inf
    seconds = lead * overview.settings.weights.get(holder.owner, 1.0)
    return overview.now + max(seconds, ROUND_TRIP)  # the other one may work elsewhere


def _yields_at(overview: Overview, row: WorkerRow, waiting: Sequence[WorkerRow]) -> float:
    """Return the time at which a worker yields to waiting ones, by present knowledge."""
    demand, settings = overview.demand_of(row), overview.settings
    switch = overview.switch_seconds.get(row.group, 0.0)
    patience, least = max(ROUND_TRIP, switch), _SWITCHES_PER_QUANTUM * switch
    step = min(overview.demand_of(each).step_seconds for each in (row, *waiting))
    steps = min(_STEPS_PER_QUANTUM * step, _SHARE_OF_WAIT * settings.max_wait)
    quantum = max(settings.quantum, least, steps)
    at = math.inf if demand.open_step else row.since + quantum
    if not demand.uses:
        idle_since = max(demand.idle_since, row.since)
        wait = max(settings.quantum, patience) if demand.open_step else patience
        at = min(at, idle_since + wait)
        if not demand.open_step and _is_elsewhere(overview, row):
            at = min(at, max(idle_since, row.since + least))
    overdue = min(_overdue_at(overview, each) for each in waiting)
    at = min(at, max(overdue, row.since + settings.quantum))
    return max(at, demand.stays_until)


def _is_elsewhere(overview: Overview, row: WorkerRow) -> bool:
    """Whether the client of an idle worker calls another worker of its session since."""
    idle_since, sessions = overview.demand_of(row).idle_since, row.sessions
    return any(
        demand.waiting and demand.waiting_since >= idle_since and sessions & other.sessions
        for other, demand in ((each, overview.demand_of(each)) for each in overview.rows.values())
        if other.key != row.key
    )


def _sleeps_at(overview: Overview, row: WorkerRow) -> float:
    """Return the time at which a worker sleeps although nobody waits."""
    demand, settings = overview.demand_of(row), overview.settings
    policy = "eager" if overview.group_of(row).drained else settings.policy
    idle_since = max(demand.idle_since, row.since)
    if not demand.idle or policy == "deferred":
        return math.inf
    if policy == "idle_after":
        return max(idle_since + settings.idle_after, demand.stays_until)
    patience = max(ROUND_TRIP, overview.switch_seconds.get(row.group, 0.0))
    return math.inf if demand.open_step else max(idle_since + patience, demand.stays_until)


# --- Sleeping -------------------------------------------------------------------------------------


def _put_to_sleep(decision: Decision, group: WorkerGroup) -> None:
    """Put idle workers to sleep if they yield, or if the policy says so."""
    waiting = _waiting_for_devices(decision.overview, group)
    for row in decision.overview.on(group):
        overview = decision.overview
        demand = overview.demand_of(row)
        if not _is_awake(overview, row) or demand.uses:
            continue
        if not demand.yielding and why_not_asleep(overview, row):
            continue
        at = overview.now if demand.yielding else _sleeps_at(overview, row)
        at = max(at, demand.rests_until)  # after a failed write, so that the database can recover
        if at > overview.now:
            decision.look_at(at)
        else:
            _sleep(decision, row, waiting)


def _sleep(decision: Decision, row: WorkerRow, waiting: Sequence[WorkerRow]) -> None:
    overview = decision.overview
    plans = why_not_asleep(overview, row) or sleep_plans(
        overview, row, following=waiting[0] if waiting else None
    )
    too_long = _refused_for_long(overview, row, waiting)
    if not isinstance(plans, str):
        first, said = plans[0], overview.bytes_of(row)
        if first.way == "host":
            said = replace(said, reserved_host=first.most_bytes)
        else:
            said = replace(said, reserved_disk=first.most_bytes)
        step = PutToSleep(row.key, plans, or_kill=too_long)
        decision.take(step, row.moved("falling_asleep", at=overview.now))
        sizes = {**overview.bytes, row.key: said}
        decision.overview = replace(decision.overview, bytes=sizes)
    elif too_long:
        reason = f"others need its devices, and it could not sleep: {plans}"
        decision.end(StopWorker(row.key, reason))
    else:
        decision.take(KeepAwake(row.key, plans))


def _refused_for_long(overview: Overview, row: WorkerRow, waiting: Sequence[WorkerRow]) -> bool:
    """Whether others waited for the longest wait after a worker found no room to sleep. A job then
    keeps its devices."""
    refused_at = overview.demand_of(row).refused_at
    if not refused_at or not waiting or row.kind == "job":
        return False
    overdue = min(_overdue_at(overview, each) for each in waiting)
    return overview.now >= max(overdue, refused_at + overview.settings.max_wait)
