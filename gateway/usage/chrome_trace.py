"""A session's timeline as a Chrome trace, which Perfetto and chrome://tracing show.

Format: the JSON object of the "Trace Event Format" (complete events `ph: "X"`, metadata events
`ph: "M"`; times in microseconds since 1970). One process for each run, sampling session and for
the workers; operations that overlap, since a client sends ahead, lie in lanes of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import orjson

from gateway.usage.sample_log import SampleSpan

_MICRO = 1e6


@dataclass(frozen=True)
class Slice:
    """Something that took a while: from `start` to `end`, in seconds since 1970."""

    name: str
    start: float
    end: float
    args: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Track:
    """A row of the trace, such as a run, with what happened there."""

    name: str
    category: str
    slices: Sequence[Slice]


def sample_tracks(spans: Iterable[SampleSpan]) -> list[Track]:
    """A track for each sampling session."""
    found: dict[str, list[Slice]] = {}
    for span in spans:
        owner, _, number = span.request_id.rpartition(":")
        args: dict[str, object] = {
            "request_id": span.request_id,
            "seq_id": int(number),
            "weight_version": span.weight_version,
            "prompt_tokens": span.prompt_tokens,
            "cached_tokens": span.cached_tokens,
            "sampled_tokens": span.sampled_tokens,
        }
        if span.error:
            args["error"] = span.error
        end = span.started_at + span.seconds
        found.setdefault(owner, []).append(
            Slice(name="sample", start=span.started_at, end=end, args=args)
        )
    return [Track(name=name, category="sample", slices=found[name]) for name in sorted(found)]


def encode(tracks: Sequence[Track], *, about: dict[str, object]) -> bytes:
    """The trace as JSON; `about` becomes its `otherData`."""
    events: list[dict[str, object]] = []
    for pid, track in enumerate(tracks, start=1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": track.name}})
        lanes = 0
        for lane, one in in_lanes(track.slices):
            if lane >= lanes:
                lanes = lane + 1
                events.append(
                    {
                        "ph": "M",
                        "name": "thread_name",
                        "pid": pid,
                        "tid": lane,
                        "args": {"name": f"{track.category} {lane}"},
                    }
                )
            events.append(
                {
                    "ph": "X",
                    "name": one.name,
                    "cat": track.category,
                    "pid": pid,
                    "tid": lane,
                    "ts": round(one.start * _MICRO),
                    "dur": max(0, round((one.end - one.start) * _MICRO)),
                    "args": one.args,
                }
            )
    return orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def in_lanes(slices: Iterable[Slice]) -> list[tuple[int, Slice]]:
    """Each slice with the first lane in which nothing else happens at its time, by start."""
    free_at: list[float] = []
    placed = []
    for one in sorted(slices, key=lambda s: (s.start, s.end)):
        lane = next((n for n, until in enumerate(free_at) if until <= one.start), len(free_at))
        if lane == len(free_at):
            free_at.append(one.end)
        else:
            free_at[lane] = one.end
        placed.append((lane, one))
    return placed
