"""Placing gives groups to waiting rows.

A row and the waiting rows in its `together` get their groups at one moment, or none does. A row
that eight later rows have overtaken comes first, then the highest priority, then the owner with the
fewest places, then the oldest request. Rows that fit overtake rows that do not. The row that comes
first by its eight overtakings lets only sessions with a place pass. If nothing fits, idle engines
end that no trainer keeps, the least recently used first.

An idle engine that no trainer keeps does not ask for a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from gateway.workers.groups import WorkerGroup
from gateway.workers.memory import gib, why_not_asleep
from gateway.workers.overview import Overview
from gateway.workers.requests import WorkerRequest
from gateway.workers.steps import Decision, PlaceRows, StopWorker, TakeGroup
from gateway.workers.table import WorkerRow
from tandem.settings.sharing import Sharing

MOST_OVERTAKEN = 8
ENGINE_QUANTUM = 60.0
"""Seconds of service before an engine ends for others."""


def place_waiting(decision: Decision) -> None:
    """Give groups to the rows that fit, in turn."""
    while (rows := _next_placed(decision.overview)) is not None:
        decision.overview = decision.overview.with_rows(rows)
        step = PlaceRows(rows)
        decision.begin(step, step.placed)


def _next_placed(overview: Overview) -> tuple[WorkerRow, ...] | None:
    """Return the changed rows of the next placement, or None if nobody fits."""
    blocked: list[WorkerRow] = []  # rows that no session without a place may overtake
    waiting = candidates(overview)
    for row in waiting:
        bundle = together_with(overview, row)
        found = find_groups(overview, bundle)
        if isinstance(found, str) or _is_behind(overview, blocked, row):
            blocked += [row] if row.overtaken >= MOST_OVERTAKEN else []
            continue
        served = {each.key for each in bundle}
        overtaken = tuple(
            replace(other, overtaken=min(other.overtaken + 1, MOST_OVERTAKEN))
            for other in waiting
            if other.key not in served
            and _arrival(overview, other) < _arrival(overview, row)
            and _compete(overview, other, row)
        )
        placed = tuple(
            each.moved("placed", at=overview.now, group=group.name, overtaken=0)
            for each, group in zip(bundle, found, strict=True)
        )
        return (*placed, *overtaken)
    return None


# --- The queue ------------------------------------------------------------------------------------


def candidates(overview: Overview) -> list[WorkerRow]:
    """Return the rows that ask for a group, the next one first."""
    asking = [
        row for row in overview.rows.values() if _waits_for_group(row) and _asks(overview, row)
    ]
    places = Counter(row.owner for row in overview.rows.values() if row.group)

    def rank(row: WorkerRow) -> tuple[float, ...]:
        arrival = _arrival(overview, row)
        if row.overtaken >= MOST_OVERTAKEN:
            return (0, 0, 0, *arrival)
        return (1, -row.request.priority, places[row.owner], *arrival)

    return sorted(asking, key=rank)


def _asks(overview: Overview, row: WorkerRow) -> bool:
    demand = overview.demand_of(row)
    if row.key in overview.busy or demand.rests_until > overview.now:
        return False
    if any(_is_being_written(overview, key) for key in row.request.together):
        return False  # the database may refuse it
    return row.kind != "engine" or demand.waiting > 0 or overview.is_kept(row)


def _is_being_written(overview: Overview, key: str) -> bool:
    """Whether a row without a process, or its place, is being written."""
    row = overview.rows.get(key)
    if row is None or row.has_process or row.ends_as == "gone":
        return False
    return key in overview.busy


def _arrival(overview: Overview, row: WorkerRow) -> tuple[float, int]:
    """Return the time of a row's request, and its number among all rows. An engine asks from its
    first call on."""
    return max(row.since, overview.demand_of(row).waiting_since), overview.numbers[row.key]


def together_with(overview: Overview, row: WorkerRow) -> list[WorkerRow]:
    """Return the rows that get their groups at one moment with this row, itself first."""
    named = (overview.rows.get(key) for key in row.request.together if key != row.key)
    return [row, *(each for each in named if each is not None and _waits_for_group(each))]


def _waits_for_group(row: WorkerRow) -> bool:
    return row.state == "waiting" and row.ends_as != "gone"


def _is_behind(overview: Overview, blocked: Iterable[WorkerRow], row: WorkerRow) -> bool:
    """Whether a row must not overtake `blocked` rows. A session with a place may: a blocked row may
    wait for the end of its run, whose program may wait for this row."""
    return any(_compete(overview, each, row) for each in blocked) and not any(
        each.group and row.session in each.sessions for each in overview.rows.values()
    )


def _compete(overview: Overview, one: WorkerRow, other: WorkerRow) -> bool:
    """Whether two rows may want the same group or the same host memory."""
    ones, others = together_with(overview, one), together_with(overview, other)
    if overview.budgets.host_bytes and _needs_host(ones) and _needs_host(others):
        return True
    groups = set(_names(overview, ones))
    return not groups.isdisjoint(_names(overview, others))


def _needs_host(rows: Iterable[WorkerRow]) -> bool:
    return any(row.request.host_bytes for row in rows)


def _names(overview: Overview, rows: Iterable[WorkerRow]) -> list[str]:
    return [g.name for row in rows for g in overview.groups.values() if g.suits(row.request)]


def families(overview: Overview, row: WorkerRow) -> list[str]:
    """Return the names, in the words of users, of the groups that suit a row."""
    suiting = (group for group in overview.groups.values() if group.suits(row.request))
    return list(dict.fromkeys(group.family for group in suiting))


# --- Room -----------------------------------------------------------------------------------------


def find_groups(overview: Overview, rows: Sequence[WorkerRow]) -> tuple[WorkerGroup, ...] | str:
    """Return a group for each row, with few workers if possible, or the reason against it."""
    for row in rows:
        for key in row.request.together:
            engine = overview.rows.get(key)
            if engine is not None and engine.ends_as == "waiting":
                return "one of its engines is ending"
    for row in rows:  # without a group alone, it has none beside others
        if isinstance(found := _search(overview, [row]), str):
            return found
    return _search(overview, rows)


def _search(
    overview: Overview, rows: Sequence[WorkerRow], last: WorkerRow | None = None
) -> tuple[WorkerGroup, ...] | str:
    if not rows:
        return ()
    row, why = rows[0], f"no group{_allowed(rows[0].request)} suits it{_ranks(rows[0].request)}"
    groups = [group for group in overview.groups.values() if group.suits(row.request)]
    faults: list[str] = []
    for group in sorted(groups, key=lambda group: _preference(overview, group)):
        if fault := why_no_place(overview, row, group):
            faults.append(fault)
            continue
        placed = row.moved("placed", at=overview.now, group=group.name)
        others = _search(overview.with_rows([placed]), rows[1:], last=row)
        if not isinstance(others, str):
            return (group, *others)
        faults.append(others)
        if last is not None and _alike(last.request, row.request):
            break  # it needs as much in each group as the row before it
    return faults[0] if faults else why


def _alike(one: WorkerRequest, other: WorkerRequest) -> bool:
    return replace(one, key=other.key, together=other.together) == other


def _allowed(request: WorkerRequest) -> str:
    return f" among {', '.join(request.groups)}" if request.groups else ""


def _ranks(request: WorkerRequest) -> str:
    if request.ranks == 1:
        return ""
    where = " on one node" if request.kind == "job" else ""
    return f": none has devices for {request.ranks} ranks{where}"


def _preference(overview: Overview, group: WorkerGroup) -> tuple[bool, bool, int]:
    """Prefer groups with few workers, but existing claims before new ones. A group whose devices a
    job keeps comes last."""
    there = overview.on(group)
    kept = group.leased and any(why_not_asleep(overview, row) for row in there)
    return (kept, bool(group.pool) and not there, len(there))


def why_no_place(overview: Overview, row: WorkerRow, group: WorkerGroup) -> str:
    """Return why a row can have no place on a group now, or ""."""
    there, request = overview.on(group), row.request
    if group.drained:
        return f"group {group.name} is drained, and takes no more workers"
    if (launcher := group.launcher_of(row.request.kind)) in overview.silent:
        return f"the {launcher} of group {group.name} does not answer"
    if group.leased and any(
        row.kind == each.kind == "engine" and request.sampler == each.request.sampler != ""
        for each in there
    ):
        return f"another engine of the same sampler is on group {group.name}"
    if fault := _why_not_beside(row, group, there):
        return fault
    if len(there) >= group.workers > 0:
        setting = "TANDEM_CLAIM_POOLS" if group.pool else "TANDEM_GROUPS"
        return f"{len(there)} workers are there ({setting} workers)"
    if fault := _why_not_on_devices(request, group, there):
        return fault
    return _why_not_in_host_memory(overview, request, group, there)


def _why_not_beside(row: WorkerRow, group: WorkerGroup, there: Sequence[WorkerRow]) -> str:
    """A run with exclusive devices shares its group with its own engines alone."""
    others = [each for each in there if each.request.run_name != row.request.run_name]
    own = [each for each in others if row.session in each.sessions]
    remedy = ""
    if own:
        names = "tandem.group, tandem.sampler_group"
        remedy = f": give one of them another group ({names}), or end the other"
    if any(group.sharing_of(each.request) == Sharing.EXCLUSIVE for each in others):
        holder = "another worker of this session" if own else "a run"
        return f"{holder} has group {group.name} to itself (tandem.sharing exclusive){remedy}"
    if others and group.sharing_of(row.request) == Sharing.EXCLUSIVE:
        where = f"are there, {len(own)} of them of this session" if own else "are there"
        return (
            f"it needs group {group.name} to itself (tandem.sharing exclusive), and "
            f"{len(others)} workers of other runs {where}{remedy}"
        )
    return ""


def _why_not_on_devices(
    request: WorkerRequest, group: WorkerGroup, there: Sequence[WorkerRow]
) -> str:
    """Where workers take turns, each must fit beside the contexts of sleepers. Elsewhere all must
    fit at once."""
    if not group.device_bytes:
        return ""
    needs = [request.device_bytes, *(row.request.device_bytes for row in there)]
    if there and not group.leased and not all(needs):
        return f"a worker of unknown need has group {group.name} alone"
    needed = (max(needs) if group.leased else sum(needs)) + len(needs) * group.context_bytes
    if max(needs) and needed > group.device_bytes:
        return (
            f"{len(needs)} workers would need {gib(needed)} of a device's "
            f"{gib(group.device_bytes)} on group {group.name}"
        )
    return ""


def _why_not_in_host_memory(
    overview: Overview, request: WorkerRequest, group: WorkerGroup, there: Sequence[WorkerRow]
) -> str:
    if not request.host_bytes:
        return ""
    bounds = (
        (group.node_bytes, there, "its node's memory", f"on group {group.name}"),
        (
            overview.budgets.host_bytes,
            overview.rows.values(),
            "the host's memory",
            "(TANDEM_HOST_MEMORY_BYTES)",
        ),
    )
    for bound, rows, memory, where in bounds:
        if not bound:
            continue
        taken = sum(row.request.host_bytes for row in rows if row.group)
        if taken + request.host_bytes > bound:
            return (
                f"it needs {gib(request.host_bytes)} of {memory}, and workers have {gib(taken)} "
                f"of {gib(bound)} {where}"
            )
    return ""


# --- Making room ----------------------------------------------------------------------------------


def make_room(decision: Decision) -> None:
    """End idle engines where that makes room for a waiting row, and on drained groups.

    An engine serves for a quantum before it ends for others. Without a process it loses its place
    at once."""
    overview = decision.overview
    idle = sorted(
        (row for row in overview.rows.values() if _may_end(overview, row)),
        key=lambda row: overview.demand_of(row).idle_since,
    )
    ripe = [row for row in idle if _ripe_at(overview, row) <= overview.now]
    ending = {row.key for row in ripe if _ends_anyway(overview, row)}
    imagined = _without(overview, [row for row in overview.rows.values() if _ends(row)])
    imagined = _without(imagined, [row for row in ripe if row.key in ending])
    blocked: list[WorkerRow] = []
    asking = candidates(overview)
    for row in asking:
        if _is_behind(overview, blocked, row):
            continue
        bundle, before, chosen = together_with(overview, row), imagined, list[WorkerRow]()
        found = find_groups(imagined, bundle)
        helpful = (e for e in ripe if e.key not in ending and _helps(overview, e, bundle))
        while isinstance(found, str) and (engine := next(helpful, None)) is not None:
            chosen.append(engine)
            imagined = _without(imagined, [engine])
            found = find_groups(imagined, bundle)
        if isinstance(found, str):
            imagined = before
            blocked += [row] if row.overtaken >= MOST_OVERTAKEN else []
            continue
        ending.update(engine.key for engine in chosen)
        imagined = imagined.with_rows(
            [
                each.moved("placed", at=overview.now, group=group.name)
                for each, group in zip(bundle, found, strict=True)
            ]
        )
    for row in ripe:
        if row.key not in ending:
            continue
        if row.has_process:
            reason = "another worker needs its place"
            decision.end(StopWorker(row.key, reason, at_once=False, ends_as="waiting"))
        else:
            decision.end(TakeGroup(row.key))
    for row in idle if asking else ():
        decision.look_at(_ripe_at(overview, row))


def _may_end(overview: Overview, row: WorkerRow) -> bool:
    return (
        row.kind == "engine"
        and row.state in ("placed", "awake", "asleep")
        and row.ends_as == "placed"
        and row.key not in overview.busy
        and overview.demand_of(row).idle
        and not overview.is_kept(row)
    )


def _ends_anyway(overview: Overview, row: WorkerRow) -> bool:
    """Whether an engine ends even if nobody needs its place: without a process, or on a drained
    group."""
    return not row.has_process or overview.group_of(row).drained


def _ripe_at(overview: Overview, row: WorkerRow) -> float:
    if _ends_anyway(overview, row):
        return overview.now
    return overview.demand_of(row).started_at + ENGINE_QUANTUM


def _ends(row: WorkerRow) -> bool:
    return bool(row.group) and row.ends_as != "placed"


def _without(overview: Overview, rows: Sequence[WorkerRow]) -> Overview:
    """Return the overview as if these rows had no group."""
    return overview.with_rows(
        [replace(row, state="waiting", group="", ends_as="placed") for row in rows]
    )


def _helps(overview: Overview, engine: WorkerRow, bundle: Sequence[WorkerRow]) -> bool:
    """Whether the end of an engine may make room for these rows."""
    host = overview.budgets.host_bytes and engine.request.host_bytes
    group = overview.group_of(engine)
    return any(group.suits(row.request) or (host and row.request.host_bytes) for row in bundle)
