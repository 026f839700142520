"""Runs as pages show them: rows of the list, and curves that do not delay a page."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from markupsafe import Markup

from gateway.api.pages.charts import sparkline
from gateway.api.pages.texts import clock
from gateway.core import Gateway
from gateway.owners.limits import Ledger
from gateway.runs.record.curves import Curve
from gateway.runs.record.lineage import Ancestor
from gateway.runs.record.progress import RecordIndex
from gateway.runs.record.rows import RunRecord
from gateway.storage.fair_queue import FairSemaphore
from gateway.workers.schedule import WaitReason
from tandem.tracking.names import main_metric

Value = TypeVar("Value")

PATIENCE = 0.1
"""Seconds that a page waits for curves. Those of a long run come later, over its stream."""
_SPARK_POINTS = 40
_REMEMBERED = 2000
_MOST_STREAMS = 16
"""Of one owner."""
_DRAWING = 2
"""Pages drawn at once, because Python holds the interpreter lock."""


@dataclass(frozen=True)
class RunRow:
    """A run in the list. `state` is a word, and `why` a sentence or "". `main` is the name of its
    main metric, "" without any."""

    run: RunRecord
    index: RecordIndex
    state: str
    why: str
    main: str
    spark: Markup


class RunViews:
    """Remembers sparklines, and the reading of curves that took too long for a page."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.drawing = FairSemaphore(slots=_DRAWING)
        self.streams = Ledger(
            limit="live_pages",
            what="live pages",
            per_owner=_MOST_STREAMS,
            in_all=2**62,
            refused=gateway.limits.note_refusal,
        )
        self._sparks: OrderedDict[str, tuple[int, Markup]] = OrderedDict()
        self._reading: dict[str, asyncio.Task[Any]] = {}

    async def rows(self, found: Sequence[RunRecord]) -> list[RunRow]:
        indexes = await self._gateway.record.summaries([run.id for run in found])
        return await asyncio.gather(*(self._row(run, indexes[run.id]) for run in found))

    async def curves(
        self,
        run_id: str,
        names: Sequence[str] | None,
        points: int,
        ancestors: Sequence[Ancestor] = (),
    ) -> dict[str, Curve] | None:
        """Return a run's curves, None if reading takes long. Then a later call finds them."""
        reading = self._gateway.record.curves(run_id, names, points, ancestors)
        return await self._soon(f"{run_id} {names} {points} {ancestors}", reading)

    def state_of(self, run: RunRecord) -> tuple[str, str]:
        """Return the state of a run in a word, and why, "" if all is well."""
        jobs, live = self._gateway.jobs, self._gateway.runs.get(run.id)
        if (job := jobs.find_job(run.id)) is not None:
            return run.state, run.reason or _since(jobs.explain_job(job))
        if live is None or live.state == "ended":
            return ("failed" if run.failed else "ended"), run.reason
        why = live.error.message if live.error is not None else live.trouble
        if live.state == "starting":
            return "starting", why
        return ("waiting" if why else "running" if live.dispatcher.queued else "idle"), why

    async def _row(self, run: RunRecord, index: RecordIndex) -> RunRow:
        state, why = self.state_of(run)
        main = main_metric(index.last)
        spark = await self._spark(index, main) if main else Markup()
        return RunRow(run, index, state, why, main, spark)

    async def _spark(self, index: RecordIndex, name: str) -> Markup:
        rows, drawn = self._sparks.get(index.run_id, (-1, Markup()))
        if rows == index.rows:
            return drawn
        curves = await self.curves(index.run_id, [name], _SPARK_POINTS)
        if curves is None:
            return drawn
        drawn = sparkline(curves[name].value.tolist()) if name in curves else Markup()
        self._sparks[index.run_id] = (index.rows, drawn)
        if len(self._sparks) > _REMEMBERED:
            self._sparks.popitem(last=False)
        return drawn

    async def _soon(self, key: str, reading: Coroutine[Any, Any, Value]) -> Value | None:
        """Wait for a short time. The reading then goes on, and only once for each key."""
        if (task := self._reading.get(key)) is None:
            task = self._reading[key] = asyncio.create_task(reading)
            task.add_done_callback(lambda done: self._end_reading(key, done))
        else:
            reading.close()
        done, _ = await asyncio.wait([task], timeout=PATIENCE)
        return task.result() if done else None

    def _end_reading(self, key: str, task: asyncio.Task[Any]) -> None:
        del self._reading[key]
        if not task.cancelled():
            task.exception()  # a waiting page raises it


def _since(waits: WaitReason) -> str:
    """Return why a job waits, and since when."""
    began = clock(time.time() - waits.seconds, dated=waits.seconds > 86_400)
    return f"{waits.reason} (since {began} UTC)" if waits.reason else ""
