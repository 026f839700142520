"""The format of a Chrome trace."""

from __future__ import annotations

import json

from gateway.usage.trace_exports import Slice, Track, assign_threads, encode


def test_what_overlaps_lies_in_different_threads():
    slices = [
        Slice(name=name, start=start, end=end)
        for name, start, end in (("d", 4, 5), ("a", 0, 3), ("b", 1, 2), ("c", 2, 4), ("e", 4, 6))
    ]
    assert [(thread, s.name) for thread, s in assign_threads(slices)] == [
        (0, "a"),
        (1, "b"),
        (1, "c"),
        (0, "d"),
        (1, "e"),
    ]


def test_the_format_has_microseconds_and_a_name_for_each_row():
    track = Track(name="run", category="operation", slices=[Slice("x", 1.5, 1.75, {"k": "v"})])
    trace = json.loads(encode([track], about={"session_id": "s"}))
    process, thread, event = trace["traceEvents"]
    assert (process["ph"], process["args"]) == ("M", {"name": "run"})
    assert (thread["ph"], thread["args"]) == ("M", {"name": "operation 0"})
    assert (event["ph"], event["ts"], event["dur"]) == ("X", 1_500_000, 250_000)
    assert (event["name"], event["args"]) == ("x", {"k": "v"})
    assert trace["otherData"] == {"session_id": "s"}
