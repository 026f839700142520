"""What the page of a run shows beside its curves, read again as the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import orjson
from markupsafe import Markup

from gateway.api.pages.boards import POINTS, SECONDS
from gateway.api.pages.charts import Mark, stacked_bars
from gateway.api.pages.run_views import RunViews
from gateway.checkpoints.catalog import Checkpoint
from gateway.core import Gateway
from gateway.runs.operations import Call
from gateway.runs.record.curves import Curve
from gateway.runs.record.events import RunEvent, run_events
from gateway.runs.record.progress import RecordIndex, StepProgress
from gateway.runs.record.rows import RunRecord
from gateway.runs.run import Run

SHARES: Mapping[str, str] = {
    "compute": "computing",
    "samples": "waiting for samples",
    "client": "the client's own work",
    "queue": "queueing",
    "devices": "waiting for devices",
    "place": "waiting for a place",
    "weights": "waiting for weights",
    "publish": "publishing weights",
}
_MARKED = ("restored", "moved", "slept", "stopped")
_MOST_MARKS = 40
_NOTHING = Curve(np.array([], np.int64), np.array([]), np.array([]))
_MOST_ROWS = 200


@dataclass(frozen=True)
class Happening:
    """An event and the step after it, None if no step followed."""

    event: RunEvent
    step: int | None


@dataclass(frozen=True)
class RunFacts:
    """`shares` has the seconds of the last step by share, and `drawn` is their chart."""

    run: RunRecord
    index: RecordIndex
    progress: StepProgress | None
    state: str
    why: str
    live: Run | None
    shares: Mapping[str, float]
    drawn: Markup
    happenings: Sequence[Happening]
    saved: Sequence[Checkpoint]

    @property
    def call(self) -> Call | None:
        return self.live.dispatcher.first if self.live is not None else None

    @property
    def marks(self) -> list[Mark]:
        """The trainer's events on the curves. Frequent turns on shared devices are none."""
        found = [
            Mark(each.step, each.event.event)
            for each in self.happenings
            if each.step is not None
            and each.event.worker == "trainer"
            and each.event.event in _MARKED
        ]
        turns = len(found) > _MOST_MARKS
        return [mark for mark in found if not turns or mark.text != "slept"][-_MOST_MARKS:]

    @property
    def marks_json(self) -> str:
        return orjson.dumps(self.marks).decode()


async def read_facts(gateway: Gateway, views: RunViews, run: RunRecord) -> RunFacts:
    index = (await gateway.record.summaries([run.id])).get(run.id, RecordIndex(run.id))
    names = [f"{SECONDS}{share}" for share in SHARES]
    seconds = await views.curves(run.id, [*names, f"{SECONDS}step"], POINTS) or {}
    state, why = views.state_of(run)
    shares = {share: index.last.get(name) for share, name in zip(SHARES, names, strict=True)}
    parts = [seconds.get(name, _NOTHING) for name in names]
    events = await run_events(gateway.database, run)
    saved = [each async for page in gateway.checkpoints.of_run(run.id) for each in page]
    return RunFacts(
        run=run,
        index=index,
        progress=index.progress(run.identity.config),
        state=state,
        why=why,
        live=gateway.runs.get(run.id),
        shares={name: value for name, value in shares.items() if isinstance(value, float | int)},
        drawn=await asyncio.to_thread(stacked_bars, parts, title="Seconds of each step"),
        happenings=_happenings(events[-_MOST_ROWS:], seconds.get(f"{SECONDS}step")),
        saved=saved[: -_MOST_ROWS - 1 : -1],
    )


def _happenings(events: Sequence[RunEvent], steps: Curve | None) -> list[Happening]:
    found = []
    for event in events:
        place = int(np.searchsorted(steps.at, event.at)) if steps is not None else 0
        during = steps is not None and 0 < place < len(steps.at)
        found.append(Happening(event, int(steps.step[place]) if during and steps else None))
    return found
