"""Lanes: the states of workers over time, from the changes in `worker_events`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from sqlalchemy import RowMapping, func, select

from gateway.owners.auth.identity import Caller
from gateway.storage.database import Database
from gateway.storage.tables import runs, worker_events

_MOST_EVENTS = 20_000
_SHORTEST_WAIT = 1.0
"""Seconds of a wait for a group that is shown."""
_MOST_LANES = 200
_MOST_BARS = 300
"""Of one lane."""
LEFT, WIDTH = 190, 1000
"""Units of the picture in `devices.html`: the labels' part, and the time axis."""
_TICKS = (60, 300, 600, 1800, 3600, 4 * 3600, 12 * 3600, 86_400)
_MOST_TICKS = 8


@dataclass(frozen=True)
class Bar:
    """A state of one worker, or several short ones together, with their longest state. `x` and
    `width` are in units of the picture."""

    x: float
    width: float
    state: str
    title: str


@dataclass(frozen=True)
class Chart:
    """The lanes of one group, each with its worker's name. `hidden` earlier ones are left out."""

    group: str
    lanes: Sequence[tuple[str, Sequence[Bar]]]
    hidden: int


@dataclass(frozen=True)
class WorkerNames:
    """Names for people: that of a worker's run instead of ids. `runs` maps ids of visible runs to
    their names, `engines` a sampler's model and session to the name of a run there."""

    caller: Caller
    runs: Mapping[str, str]
    engines: Mapping[tuple[str, str], str]

    def of(self, key: str, kind: str, owner: str) -> tuple[str, str]:
        """Return a worker's name, and its run's id or ""."""
        if not self.caller.may_see(owner):
            return "another owner", ""
        if kind != "engine":
            return self.runs.get(key, key), key
        session, _, rest = key.partition("#")[0].partition("/")
        model = rest.rpartition("/")[0]
        run = self.engines.get((session, model), "")
        return f"sampler: {self.runs.get(run, model)}", run


async def worker_names(database: Database, caller: Caller, sessions: Iterable[str]) -> WorkerNames:
    """Return the names of the workers of these sessions."""
    rows = await database.read(
        select(runs.c.id, runs.c.name, runs.c.session_id, runs.c.base_model)
        .where(runs.c.session_id.in_(sorted(set(sessions))))
        .order_by(runs.c.created_at)
    )
    return WorkerNames(
        caller=caller,
        runs={row["id"]: row["name"] or row["id"] for row in rows},
        engines={(row["session_id"], row["base_model"]): row["id"] for row in rows},
    )


async def read_events(database: Database, *, since: float, until: float) -> list[RowMapping]:
    """Return the changes in this time, and before them the last earlier one of each worker."""
    await database.flush()
    newest_first = (
        select(worker_events)
        .where(worker_events.c.at >= since, worker_events.c.at <= until)
        .order_by(worker_events.c.id.desc())
        .limit(_MOST_EVENTS)
    )
    found = list(reversed(await database.read(newest_first)))
    earlier = (
        select(func.max(worker_events.c.id))
        .where(worker_events.c.at < since)
        .group_by(worker_events.c.key)
    )
    before = select(worker_events).where(
        worker_events.c.id.in_(earlier), worker_events.c.state != "gone"
    )
    return [*await database.read(before), *found]


def charts(
    events: Sequence[RowMapping], names: WorkerNames, *, since: float, now: float
) -> list[Chart]:
    """Return one chart for each group, by name. Workers without a group are in the last one."""
    rows_of: defaultdict[str, list[RowMapping]] = defaultdict(list)
    for row in events:
        rows_of[row["key"]].append(row)
    bars: defaultdict[str, dict[str, list[Bar]]] = defaultdict(dict)
    scale = WIDTH / (now - since)
    for key, rows in rows_of.items():
        for row, after in zip(rows, [*rows[1:], None], strict=True):
            begin, end = max(row["at"], since), after["at"] if after else now
            if row["state"] == "gone" or end <= begin:
                continue
            if not row["group_name"] and end - begin < _SHORTEST_WAIT:
                continue
            seen = names.caller.may_see(row["owner"])
            title = _title(row, end, after["busy_seconds"] if after else 0.0)
            x, width = LEFT + (begin - since) * scale, (end - begin) * scale
            bar = Bar(x, width, row["state"], title if seen else row["state"])
            bars[row["group_name"]].setdefault(key, []).append(bar)
    labels = {
        key: names.of(key, row["kind"], row["owner"])[0] for key, (row, *_) in rows_of.items()
    }
    groups = sorted(bars, key=lambda name: (not name, name))
    return [_chart(group, bars[group], labels) for group in groups]


def _chart(group: str, bars: Mapping[str, Sequence[Bar]], labels: Mapping[str, str]) -> Chart:
    keys = sorted(bars, key=lambda key: bars[key][0].x)[-_MOST_LANES:]
    lanes = [(labels[key], _drawable(bars[key])) for key in keys]
    return Chart(group, lanes, hidden=len(bars) - len(lanes))


def _drawable(bars: Sequence[Bar]) -> list[Bar]:
    """Return bars of at least one unit, at most 300."""
    found = _joined(bars, unit=1.0)
    if len(found) > _MOST_BARS:
        found = _joined(bars, unit=2 * WIDTH / _MOST_BARS)
    return [replace(bar, x=round(bar.x, 1), width=round(max(1.0, bar.width), 1)) for bar in found]


def _joined(bars: Sequence[Bar], *, unit: float) -> list[Bar]:
    """Join neighbours that are narrower than a unit and begin within the same one."""

    def place(numbered: tuple[int, Bar]) -> tuple[int, int]:
        number, bar = numbered
        return (number, -1) if bar.width >= unit else (-1, int((bar.x - LEFT) / unit))

    return [
        _together([bar for _, bar in neighbours])
        for _, neighbours in groupby(enumerate(bars), key=place)
    ]


def _together(bars: Sequence[Bar]) -> Bar:
    if len(bars) == 1:
        return bars[0]
    widths: defaultdict[str, float] = defaultdict(float)
    for bar in bars:
        widths[bar.state] += bar.width
    state = max(widths, key=widths.__getitem__)
    title = f"{len(bars)} short states, the longest {state.replace('_', ' ')}"
    last = bars[-1]
    return Bar(bars[0].x, last.x + last.width - bars[0].x, state, title)


def _title(row: RowMapping, end: float, busy: float) -> str:
    computed = f", {busy:.0f} s of it computing" if busy else ""
    reason = f": {row['reason']}" if row["reason"] else ""
    return f"{row['state'].replace('_', ' ')} for {end - row['at']:.0f} s{computed}{reason}"


def time_ticks(since: float, now: float) -> list[tuple[float, float]]:
    """Return positions of round times, and the times."""
    fits = (step for step in _TICKS if (now - since) / step <= _MOST_TICKS)
    step = next(fits, _TICKS[-1])
    first = -(-since // step) * step
    times = [first + number * step for number in range(int((now - first) // step) + 1)]
    return [(round(LEFT + (at - since) * WIDTH / (now - since), 1), at) for at in times]
