"""What the page of a run shows beside its curves, read again as the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from gateway.api.pages.boards import POINTS, SECONDS
from gateway.api.pages.charts import Mark, stacked_bars
from gateway.api.pages.run_views import RunViews
from gateway.checkpoints.catalog import Checkpoint
from gateway.core import Gateway
from gateway.runs.record.curves import Curve
from gateway.runs.record.events import RunEvent, run_events
from gateway.runs.record.progress import RecordIndex
from gateway.runs.record.rows import RunRecord
from gateway.runs.run import Run

_SHARES: Mapping[str, str] = {
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
class RunFacts:
    """`shares` has the seconds of the last step by the label of the share, and `drawn` is their
    chart. An event comes with the step after it, None if no step followed."""

    run: RunRecord
    index: RecordIndex
    state: str
    why: str
    live: Run | None
    shares: Mapping[str, float | str | None]
    drawn: Markup
    events: Sequence[tuple[RunEvent, int | None]]
    saved: Sequence[Checkpoint]

    @property
    def marks(self) -> list[Mark]:
        """The trainer's events on the curves. Frequent turns on shared devices are none."""
        found = [
            Mark(step, event.event)
            for event, step in self.events
            if step is not None and event.worker == "trainer" and event.event in _MARKED
        ]
        turns = len(found) > _MOST_MARKS
        return [mark for mark in found if not turns or mark.text != "slept"][-_MOST_MARKS:]


async def read_facts(gateway: Gateway, views: RunViews, run: RunRecord) -> RunFacts:
    index = (await gateway.record.summaries([run.id]))[run.id]
    names = [f"{SECONDS}{share}" for share in _SHARES]
    seconds = await views.curves(run.id, [*names, f"{SECONDS}step"], POINTS) or {}
    state, why = views.state_of(run)
    parts = [seconds.get(name, _NOTHING) for name in names]
    events = await run_events(gateway.database, run)
    saved = [each async for page in gateway.checkpoints.of_run(run.id) for each in page]
    return RunFacts(
        run=run,
        index=index,
        state=state,
        why=why,
        live=gateway.runs.get(run.id),
        shares={label: index.last.get(f"{SECONDS}{share}") for share, label in _SHARES.items()},
        drawn=await asyncio.to_thread(stacked_bars, parts, title="Seconds of each step"),
        events=_with_steps(events[-_MOST_ROWS:], seconds.get(f"{SECONDS}step", _NOTHING)),
        saved=saved[: -_MOST_ROWS - 1 : -1],
    )


def _with_steps(events: Sequence[RunEvent], steps: Curve) -> list[tuple[RunEvent, int | None]]:
    places = np.searchsorted(steps.at, [event.at for event in events]).tolist()
    return [
        (event, int(steps.step[place]) if 0 < place < len(steps.at) else None)
        for event, place in zip(events, places, strict=True)
    ]
