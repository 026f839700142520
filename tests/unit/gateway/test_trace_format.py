from __future__ import annotations

import json

from gateway.owners.usage.trace_exports import EventEncoder, Slice


def encoded(*batches: list[Slice]) -> list[dict]:
    encoder = EventEncoder()
    return json.loads(b"[" + b"".join(map(encoder.encode, batches)) + b"]")


def test_what_overlaps_lies_in_different_threads():
    slices = [
        Slice("run", "operation", name=name, start=start, end=end)
        for name, start, end in (("a", 0, 3), ("b", 1, 2), ("c", 2, 4), ("d", 4, 5), ("e", 4, 6))
    ]
    events = encoded(slices[:2], slices[2:])
    assert [(e["tid"], e["name"]) for e in events if e["ph"] == "X"] == [
        (0, "a"),
        (1, "b"),
        (1, "c"),
        (0, "d"),
        (1, "e"),
    ]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == [
        "run",
        "operation 0",
        "operation 1",
    ]


def test_the_format_has_microseconds_and_a_name_for_each_row():
    process, thread, event = encoded([], [Slice("run", "operation", "x", 1.5, 1.75, {"k": "v"})])
    assert (process["ph"], process["args"]) == ("M", {"name": "run"})
    assert (thread["ph"], thread["args"]) == ("M", {"name": "operation 0"})
    assert (event["ph"], event["ts"], event["dur"]) == ("X", 1_500_000, 250_000)
    assert (event["name"], event["args"]) == ("x", {"k": "v"})


def test_each_track_has_a_process():
    slices = [Slice(track, "operation", "x", 0, 1) for track in ("a", "b", "a")]
    events = [e for e in encoded(slices) if e["ph"] == "X"]
    assert [(e["pid"], e["tid"]) for e in events] == [(1, 0), (2, 0), (1, 1)]
