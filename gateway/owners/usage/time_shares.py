"""Where the time of an optimizer step went.

The gateway notes spans of each run in memory: its operations, the trainer's computation, written
versions, loads and samples. It also notes the states of workers. At the end of a step,
`time_shares` divides the time since the previous step. Each moment belongs to one share only, so
the shares add up to the step. `_share_of` decides where spans overlap.

A gateway forgets its spans when it ends. The first step of the next one counts the time before its
start as `queue`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args
from weakref import WeakValueDictionary

from gateway.storage.futures.table import Future

Share = Literal["compute", "publish", "place", "devices", "weights", "queue", "samples", "client"]
SHARES: tuple[Share, ...] = get_args(Share)
Signal = Literal["operation", "compute", "publish", "load", "sample"]

_MOST_SPANS = 512
"""Spans of one signal in memory. Later ones extend the last one."""
_MOST_STATES = 256
_PLACE = frozenset({"waiting", "starting", "stopping", "lost"})
_DEVICES = frozenset({"placed", "falling_asleep", "asleep", "waking"})


@dataclass(frozen=True)
class Span:
    """From `begin` to `end`, in monotonic seconds. `signal` is a `Signal`, or a worker's wait such
    as `trainer:place` and `engine:devices`, or `engine:awake`."""

    signal: str
    begin: float
    end: float


def _share_of(signals: Collection[str]) -> Share:
    """Return the share of a moment that spans of these signals cover."""
    operates, samples, loads = (name in signals for name in ("operation", "sample", "load"))
    calls_wait = (samples or loads) and "engine:awake" not in signals

    def waits(share: Share) -> bool:
        for_trainer = operates and f"trainer:{share}" in signals
        return for_trainer or (calls_wait and f"engine:{share}" in signals)

    if "compute" in signals:
        return "compute"
    if "publish" in signals:
        return "publish"
    if waits("place"):
        return "place"
    if waits("devices"):
        return "devices"
    if loads:
        return "weights"
    if operates:
        return "queue"
    return "samples" if samples else "client"


def time_shares(spans: Iterable[Span], since: float, until: float) -> dict[Share, float]:
    """Return the seconds of each share between two times. Their sum is `until` - `since`."""
    edges: list[tuple[float, int, str]] = []
    for span in spans:
        begin, end = max(span.begin, since), min(span.end, until)
        if begin < end:
            edges += [(begin, 1, span.signal), (end, -1, span.signal)]
    seconds: dict[Share, float] = dict.fromkeys(SHARES, 0.0)
    counts: dict[str, int] = {}
    at = since
    for moment, change, signal in [*sorted(edges), (until, 0, "")]:
        if moment > at:
            seconds[_share_of([name for name, count in counts.items() if count])] += moment - at
            at = moment
        counts[signal] = counts.get(signal, 0) + change
    return seconds


@dataclass(eq=False)
class Timeline:
    """The spans of one run since the end `since` of its last optimizer step.

    `engines` are the keys of the engines that its samples and loads use."""

    session_id: str
    since: float
    clock: Callable[[], float]
    engines: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._spans: dict[Signal, list[tuple[float, float]]] = {}
        self._open: dict[Signal, list[float]] = {}
        self._steps_of: dict[str, int] = {}
        self._sampled = self._sampled_steps = 0
        """Samples since the last step, and the sum of their weights' steps."""
        self._last_sampled: int | None = None

    def add(self, signal: Signal, *, seconds: float) -> None:
        """Note a span that ends now."""
        now = self.clock()
        self._add(signal, now - seconds, now)

    def end_operation(self, future: Future) -> None:
        """Note the span of an operation that ends now, unless its client has had the result."""
        if not future.ended:
            self.add("operation", seconds=self.clock() - future.accepted_at)

    def _add(self, signal: Signal, begin: float, end: float) -> None:
        spans = self._spans.setdefault(signal, [])
        if len(spans) >= _MOST_SPANS:
            begin, _ = spans.pop()
        spans.append((begin, end))

    def open_span(self, signal: Signal) -> None:
        """Open a span of a signal. Spans that overlap become one."""
        self._open.setdefault(signal, []).append(self.clock())

    def close_span(self, signal: Signal) -> None:
        began = self._open[signal]
        if len(began) > 1:
            began.pop()
        else:
            self._add(signal, began.pop(), self.clock())

    @contextmanager
    def during(self, signal: Signal) -> Iterator[None]:
        self.open_span(signal)
        try:
            yield
        finally:
            self.close_span(signal)

    # --- Weights ------------------------------------------------------------------------------

    def note_published(self, version: str, *, step: int) -> None:
        self._steps_of[version] = step
        if len(self._steps_of) > _MOST_STATES:
            del self._steps_of[next(iter(self._steps_of))]

    def note_sampled(self, version: str) -> None:
        """Note the weights of a sample that ended."""
        if (step := self._steps_of.get(version)) is not None:
            self._sampled += 1
            self._sampled_steps += step
            self._last_sampled = step

    # --- Steps --------------------------------------------------------------------------------

    def end_step(
        self, workers: WorkerStates, *, step: int, trainer: str, accepted_at: float, policy: bool
    ) -> dict[str, float]:
        """Return the numbers of the optimizer step `step` that ends now: `staleness`, and
        `seconds/NAME` for each share and for the whole `step`. Begin the next one.

        `staleness`: how many steps the weights of the samples that ended meanwhile were behind the
        trainer, on average. If none ended, a `policy` loss counts the last ones. The step's
        operation was accepted at `accepted_at`."""
        now = self.clock()
        spans = [Span(name, *ends) for name, all_ends in self._spans.items() for ends in all_ends]
        spans += [Span(name, began[0], now) for name, began in self._open.items() if began]
        spans += [Span("operation", accepted_at, now)]
        spans += workers.spans("trainer", [trainer], until=now)
        spans += workers.spans("engine", self.engines, until=now)
        numbers = {
            f"seconds/{name}": seconds
            for name, seconds in time_shares(spans, self.since, now).items()
        }
        numbers["seconds/step"] = now - self.since
        if self._sampled:
            numbers["staleness"] = step - 1 - self._sampled_steps / self._sampled
        elif policy and self._last_sampled is not None:
            numbers["staleness"] = float(step - 1 - self._last_sampled)
        self.since = now
        self._spans.clear()
        self._sampled = self._sampled_steps = 0
        return numbers


class WorkerStates:
    """The latest states of all workers, by key."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._states: dict[str, deque[tuple[float, str]]] = {}

    def note(self, key: str, state: str) -> None:
        if state == "gone":
            self._states.pop(key, None)
        else:
            states = self._states.setdefault(key, deque(maxlen=_MOST_STATES))
            states.append((self._clock(), state))

    def spans(self, role: str, keys: Iterable[str], *, until: float) -> Iterator[Span]:
        """Yield the waits for these workers, and the times when they were awake."""
        for key in keys:
            states = [*self._states.get(key, ()), (until, "")]
            for (begin, state), (end, _) in pairwise(states):
                if state in _PLACE:
                    yield Span(f"{role}:place", begin, end)
                elif state in _DEVICES:
                    yield Span(f"{role}:devices", begin, end)
                else:
                    yield Span(f"{role}:awake", begin, end)


class Timelines:
    """The timelines of the runs in memory, as long as somebody holds them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._runs: WeakValueDictionary[str, Timeline] = WeakValueDictionary()
        self.workers = WorkerStates(clock)

    def open(self, run_id: str, *, session_id: str, ago: float = 0.0) -> Timeline:
        """Begin the timeline of a run, whose last step ended `ago` seconds ago."""
        now = self._clock()
        timeline = Timeline(session_id, since=now - ago, clock=self._clock)
        timeline.add("operation", seconds=ago)
        self._runs[run_id] = timeline
        return timeline

    def begin_sample(
        self, *, run_id: str, session_id: str, engines: Iterable[str]
    ) -> Callable[[str], None]:
        """Note a sample of a run's weights. Samples of other weights count for all runs of their
        session. Call the result with the version at its end, "" if it failed."""
        run = self._runs.get(run_id)
        found = [run] if run else [t for t in self._runs.values() if t.session_id == session_id]
        for timeline in found:
            timeline.engines.update(engines)
            timeline.open_span("sample")

        def end(version: str) -> None:
            for timeline in found:
                timeline.close_span("sample")
            if run is not None:
                run.note_sampled(version)

        return end
