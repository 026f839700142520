"""The decision: from an overview of all workers to the next steps.

It is pure: the same overview gives the same steps. Rows end first, since that makes room. Calls
that waited too long are refused. Then waiting rows get groups, and placed rows take turns. Each
part sees the overview after the steps of the parts before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.workers.memory import why_not_asleep, why_not_on_device, why_not_on_host
from gateway.workers.overview import Overview
from gateway.workers.placing import (
    candidates,
    families,
    find_groups,
    make_room,
    place_waiting,
    together_with,
)
from gateway.workers.steps import (
    Decision,
    FindWorker,
    ForgetRow,
    RefuseCalls,
    Step,
    StopWorker,
    TakeGroup,
)
from gateway.workers.table import UNCERTAIN, WorkerRow
from gateway.workers.turns import queue, take_turns, why_not_start

CONTENDED_SILENCE = 15.0
"""Seconds after which a silent worker is killed if others wait for its devices."""


def schedule(overview: Overview) -> tuple[list[Step], float]:
    """Return the next steps, and the time at which to decide again if nothing happens before."""
    decision = Decision(overview)
    _end_rows(decision)
    _refuse_calls(decision)
    place_waiting(decision)
    make_room(decision)
    for group in overview.groups.values():
        take_turns(decision, group)
    for demand in overview.demand.values():
        decision.look_at(demand.rests_until)
    return decision.steps, decision.again_at


def _end_rows(decision: Decision) -> None:
    """End rows that were released, silent workers, and stops that an earlier gateway began."""
    overview = decision.overview
    for row in overview.rows.values():
        if row.key in overview.busy and not (row.state == "starting" and row.ends_as == "gone"):
            continue
        ends = row.state == "stopping" or (row.ends_as != "placed" and row.has_process)
        uncertain = row.state in UNCERTAIN
        if (ends or uncertain) and overview.demand_of(row).rests_until > overview.now:
            continue
        if ends:
            at_once = row.state in ("starting", "stopping")
            reason = row.reason or "it was released"
            decision.end(StopWorker(row.key, reason, at_once=at_once, ends_as=row.ends_as))
        elif row.ends_as == "gone":
            decision.end(ForgetRow(row.key))
        elif row.state == "placed" and (row.ends_as == "waiting" or _leaves(overview, row)):
            decision.end(TakeGroup(row.key))
        elif uncertain:
            decision.begin(FindWorker(row.key), [row.key])
        elif row.state == "awake" and (since := overview.demand_of(row).silent_since):
            _end_silent(decision, overview, row, since)


def _leaves(overview: Overview, row: WorkerRow) -> bool:
    """Whether a job between two attempts leaves a drained group."""
    return row.kind == "job" and overview.group_of(row).drained


def _end_silent(decision: Decision, overview: Overview, row: WorkerRow, since: float) -> None:
    """Kill a silent worker, sooner while others wait for its devices. If its launcher is silent
    too, look for the worker instead."""
    group, patience = overview.group_of(row), overview.budgets.silence
    if group.leased and any(each.key != row.key for each in queue(overview, group)):
        patience = min(patience, CONTENDED_SILENCE)
    if overview.now < since + patience:
        decision.look_at(since + patience)
    elif group.launcher_of(row.request.kind) not in overview.silent:
        seconds = overview.now - since
        reason = f"it did not answer its heartbeat for {seconds:.0f} s"
        decision.end(StopWorker(row.key, reason))
    elif overview.demand_of(row).rests_until <= overview.now:
        decision.begin(FindWorker(row.key), [row.key])


def _refuse_calls(decision: Decision) -> None:
    """Refuse the calls of engines that nobody could serve for the whole patience."""
    patience = decision.overview.budgets.patience
    for row in decision.overview.rows.values():
        overview = decision.overview
        demand, since = overview.demand_of(row), _unserved_since(overview, row)
        if row.kind != "engine" or not demand.waiting or since is None:
            continue
        if (at := max(since, demand.waiting_since) + patience) > overview.now:
            decision.look_at(at)
            continue
        explained = explain_wait(overview, row)
        why = f" ({explained.reason})" if explained is not None else ""
        reason = f"nobody could serve it within {patience:g} s{why}; try again later"
        decision.take(RefuseCalls(row.key, reason))
        decision.overview = overview.with_demand(row, replace(demand, waiting=0))


def _unserved_since(overview: Overview, row: WorkerRow) -> float | None:
    """Return the time since when a row has no group, its launcher does not answer while it is
    needed, or a job holds its devices. None: neither is so."""
    if row.state in ("waiting", "lost", "stopping"):
        return row.since
    if row.state in ("placed", "starting"):
        silent = overview.silent.get(overview.group_of(row).launcher_of(row.request.kind))
        if silent is not None:
            return silent
    jobs = _jobs_in_the_way(overview, row) if row.state in ("placed", "asleep") else []
    return min((job.since for job in jobs), default=None)


def _jobs_in_the_way(overview: Overview, row: WorkerRow) -> list[WorkerRow]:
    """Return the jobs that hold devices until they end, while a worker waits for these."""
    group = overview.group_of(row)
    there = overview.on(group) if group.leased else ()
    jobs = [each for each in there if each.occupies and why_not_asleep(overview, each)]
    return jobs if jobs and why_not_on_device(overview, row) else []


# --- Reasons --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WaitReason:
    """The reason why a worker is not awake. `position` is its turn, from 1, or 0 in no queue. The
    wait, or the state, has lasted for `seconds`."""

    reason: str
    position: int = 0
    seconds: float = 0.0


def explain_wait(
    overview: Overview, row: WorkerRow, *, waiting: Sequence[WorkerRow] | None = None
) -> WaitReason | None:
    """Return why a worker is not awake, or None if it is. `waiting` are the `candidates`, or the
    `queue` of its group, which a caller with many rows finds once."""
    demand = overview.demand_of(row)
    since = demand.waiting_since if demand.waiting else row.since
    seconds = overview.now - since
    if row.state == "awake" and not demand.waiting:
        return None
    if row.state == "waiting":
        return _explain_placing(overview, row, seconds, waiting or candidates(overview))
    if row.state in ("placed", "asleep"):
        return _explain_turn(overview, row, seconds, waiting)
    doing = {
        "awake": f"it makes room for another worker on group {row.group}",
        "starting": "its process is starting",
        "waking": f"its state moves to the devices of group {row.group}",
        "falling_asleep": f"it makes room for another worker on group {row.group}",
        "stopping": "its process is ending",
        "lost": "neither it nor its launcher answers",
    }[row.state]
    return WaitReason(reason=f"{doing}: {row.reason}" if row.reason else doing, seconds=seconds)


def _explain_placing(
    overview: Overview, row: WorkerRow, seconds: float, waiting: Sequence[WorkerRow]
) -> WaitReason:
    led = [each for each in waiting if row.key in (each.key, *each.request.together)]
    if not led:
        unused = row.kind == "engine" and not overview.demand_of(row).waiting
        why = "nobody uses it now" if unused else "the database is asked to note its places"
        return WaitReason(reason=row.reason or why, seconds=seconds)
    bundle = together_with(overview, led[0])
    found = find_groups(overview, bundle)
    why = found if isinstance(found, str) else "others have waited longer and are next"
    position = waiting.index(led[0]) + 1
    places = [" or ".join(families(overview, each)) for each in bundle]
    where = " and ".join(f"a place on group {names}" for names in places)
    return WaitReason(
        reason=f"{_ordinal(position)} in the queue for {where}: {why}",
        position=position,
        seconds=seconds,
    )


def _explain_turn(
    overview: Overview, row: WorkerRow, seconds: float, waiting: Sequence[WorkerRow] | None
) -> WaitReason:
    group, demand = overview.group_of(row), overview.demand_of(row)
    failed = f"; it failed before: {row.reason}" if row.reason else ""
    if not demand.waiting:
        return WaitReason(reason=f"nobody uses it now{failed}", seconds=seconds)
    if demand.rests_until > overview.now:
        rest = demand.rests_until - overview.now
        return WaitReason(reason=f"it starts again in {rest:.1f} s{failed}", seconds=seconds)
    if row.state == "placed" and (why := why_not_start(overview, row)):
        return WaitReason(reason=why, seconds=seconds)
    keys = [each.key for each in (queue(overview, group) if waiting is None else waiting)]
    if row.key not in keys:
        return WaitReason(reason="its step under way has to end first", seconds=seconds)
    position = keys.index(row.key) + 1
    why = why_not_on_device(overview, row) or why_not_on_host(overview, row) or "it is next"
    if jobs := _jobs_in_the_way(overview, row):
        held_by = next((each for each in jobs if each.owner == row.owner), jobs[0])
        job = f"the job {held_by.key}" if held_by.owner == row.owner else "a job"
        keeps = why_not_asleep(overview, held_by)
        why = f"{job} holds devices of group {group.name} until it ends: {keeps}"
    for other in overview.on(group):
        if overview.demand_of(other).stays_until > overview.now and other.state == "awake":
            why = f"a worker of group {group.name} cannot be put to sleep"
            if other.owner == row.owner:  # the reason may name the worker's session
                why = f"{why}: {other.reason}"
        if other.state == "lost":
            why = f"neither a worker of group {group.name} nor its launcher answers"
    reason = f"{_ordinal(position)} in the queue for the devices of group {group.name}: {why}"
    return WaitReason(reason=reason, position=position, seconds=seconds)


def _ordinal(number: int) -> str:
    """Literal examples: 1st, 2nd, 3rd, 4th, 11th."""
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else endings.get(number % 10, 'th')}"
