"""The standing of workers: answers for runs, samplers and the API, from an overview."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.workers.groups import WorkerGroup
from gateway.workers.memory import why_not_on_device, why_not_on_host
from gateway.workers.overview import Demand, Overview, WorkerBytes
from gateway.workers.placing import candidates
from gateway.workers.requests import WorkerRequest
from gateway.workers.schedule import explain_wait
from gateway.workers.table import WorkerRow
from gateway.workers.turns import queue, why_not_start


def is_place_free(overview: Overview, request: WorkerRequest, *, expected: int = 0) -> bool:
    """Whether a trainer can have a group for itself, after `expected` trainers without a row. A
    machine with one group has none."""
    groups = [group for group in overview.groups.values() if group.suits(request)]
    empty = sum(not overview.on(group) and not group.drained for group in groups)
    before = sum(
        row.state == "waiting" and row.kind == request.kind for row in overview.rows.values()
    )
    return len(groups) > 1 and empty > before + expected


def are_side_by_side(overview: Overview, one: str, other: str) -> bool:
    """Whether two workers of one rank each are awake on the same device."""
    rows = [overview.rows.get(key) for key in (one, other)]
    found = [row for row in rows if row is not None and row.state == "awake"]
    if len(found) < 2 or any(row.request.ranks > 1 for row in found):
        return False
    first, second = found
    return first.group == second.group and not overview.group_of(first).pool


def are_devices_idle(overview: Overview, keys: Sequence[str]) -> bool:
    """Whether workers that do not run could all start now, without another's sleep."""
    started: list[WorkerRow] = []
    for key in keys:
        row, imagined = overview.rows.get(key), overview.with_rows(started)
        if row is None or row.state != "placed" or why_not_start(imagined, row):
            return False
        if why_not_on_device(imagined, row) or why_not_on_host(imagined, row):
            return False
        started.append(row.moved("starting", at=overview.now))
    return True


def engines_of(overview: Overview, sampler: str) -> list[WorkerRow]:
    """Return the rows of a sampler's engines, without leaving ones."""
    return [row for row in overview.rows.values() if sampler in row.holders]


def reason_of_wait(overview: Overview, key: str) -> str:
    """Return why a worker's calls wait, why it has no group, or that nobody answers for it. Return
    "" if nobody waits for it."""
    row = overview.rows.get(key)
    if row is None:
        return ""
    waits = overview.demand_of(row).waiting or _waits_for_group(overview, row)
    if not waits and row.state != "lost":
        return ""
    reason = explain_wait(overview, row)
    return reason.reason if reason is not None else ""


def _waits_for_group(overview: Overview, row: WorkerRow) -> bool:
    return row.state == "waiting" and any(row.key == each.key for each in candidates(overview))


# --- Groups ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """A worker on a group, or in the queue for places. `position` is its turn, from 1, or 0 in no
    queue. It has had the devices, or has waited, for `seconds`. It will wait for about
    `expected_seconds` more."""

    row: WorkerRow
    state: str
    demand: Demand
    bytes: WorkerBytes
    position: int = 0
    seconds: float = 0.0
    expected_seconds: float = 0.0
    reason: str = ""


def standings(overview: Overview, group: WorkerGroup) -> list[Standing]:
    """Return the workers of a group: occupying ones, waiting ones in turn, others."""
    waiting = queue(overview, group)
    order = {row.key: number for number, row in enumerate(waiting, start=1)}
    there = [_standing(overview, row, order.get(row.key, 0), waiting) for row in overview.on(group)]
    return sorted(there, key=lambda each: (not each.row.occupies, each.position or len(order) + 1))


def applicants(overview: Overview) -> list[Standing]:
    """Return the rows that wait for a group, the next one first."""
    waiting = candidates(overview)
    return [
        _standing(overview, row, number, waiting) for number, row in enumerate(waiting, start=1)
    ]


def _standing(
    overview: Overview,
    row: WorkerRow,
    position: int,
    waiting: Sequence[WorkerRow],
) -> Standing:
    demand, wait = overview.demand_of(row), explain_wait(overview, row, waiting=waiting)
    waits = bool(demand.waiting) or row.state == "waiting"
    seconds = overview.now - row.since if row.occupies else 0.0
    reason = row.reason
    if waits and wait is not None:
        seconds, reason = wait.seconds, wait.reason
    switch = overview.switch_seconds.get(row.group, 0.0)
    return Standing(
        row,
        state=_state_of(row, demand),
        demand=demand,
        bytes=overview.bytes_of(row),
        position=position,
        seconds=max(0.0, seconds),
        expected_seconds=position * (overview.settings.quantum + switch) if row.group else 0.0,
        reason=reason,
    )


def _state_of(row: WorkerRow, demand: Demand) -> str:
    """Return the state that users see: `waiting` for the devices, `absent` without a process, or
    `giving_way` to another worker."""
    if row.state == "awake" and demand.yielding:
        return "giving_way"
    if row.state in ("placed", "asleep") and demand.waiting:
        return "waiting"
    return "absent" if row.state == "placed" else row.state
