"""Curves of metrics from a run's files."""

from __future__ import annotations

import json
import math
import resource
import time

import numpy as np
import pytest

from gateway.runs.record.curves import Curve, CurveCache, CurveTable, downsampled, joined
from gateway.runs.record.files import SegmentWriter, record_folder
from gateway.runs.record.metrics import MetricsRow, lines_of_rows

RUN = "s-1:train:0"


def written(folder, *rows, epoch=1):
    found = [MetricsRow(step, values, 1.0) for step, values in rows]
    lines = lines_of_rows(found, "user", (), 0.0).lines
    SegmentWriter(folder, "metrics", epoch).append(b"".join(lines))


def table_of(folder, **options):
    table = CurveTable(folder, **options)
    table.read_new()
    return table


def curve(values):
    count = len(values)
    return Curve(np.arange(count), np.array(values, dtype=float), np.zeros(count))


def points(found):
    return dict(zip(found.step.tolist(), found.value.tolist(), strict=True))


def test_the_last_row_of_a_step_counts_for_each_name_and_steps_are_in_order(tmp_path):
    written(tmp_path, (5, {"a": 1, "b": 1}), (7, {"a": 2}))
    table = table_of(tmp_path)
    written(tmp_path, (6, {"a": 3}), (5, {"a": 4}), epoch=2)
    table.read_new()
    found = table.curves(None)
    assert points(found["a"]) == {5: 4, 6: 3, 7: 2} and points(found["b"]) == {5: 1}


def test_lines_that_are_no_rows_are_passed_over(tmp_path):
    bad = [b"x", b"[]", b'{"step":1}', b'{"step":"a","at":1,"values":{}}', b'{"step":1,"at":1}']
    bad += [b'{"step":1,"at":1,"values":{"a":"text"}}', b'{"step":1,"at":1,"values":[1]}', b"\xff"]
    SegmentWriter(tmp_path, "metrics", 1).append(b"\n".join(bad) + b"\n")
    written(tmp_path, (1, {"a": 1}), epoch=2)
    assert points(table_of(tmp_path).curves(None)["a"]) == {1: 1}


def test_numbers_that_are_not_finite_are_kept_and_written_as_text(tmp_path):
    written(tmp_path, (1, {"a": math.nan}), (2, {"a": math.inf}), (3, {"a": -math.inf}))
    (line, *_) = next(tmp_path.iterdir()).read_text().splitlines()
    assert json.loads(line)["values"] == {"a": "NaN"}
    found = table_of(tmp_path).curves(["a", "none"])
    assert found["a"].as_json()["value"] == ["NaN", "Infinity", "-Infinity"]


def test_a_downsampled_curve_keeps_first_last_least_and_greatest():
    values = np.sin(np.arange(10_000.0))
    values[3456], values[7890] = 9, -9
    found = downsampled(curve(values), 100)
    assert len(found.step) <= 100 and (np.diff(found.step) > 0).all()
    assert {0, 3456, 7890, 9999} <= set(found.step.tolist())
    assert all(values[step] == value for step, value in points(found).items())


def test_a_downsampled_curve_shows_that_there_was_no_number():
    values = np.arange(1000.0)
    values[500] = math.nan
    found = downsampled(curve(values), 50)
    assert np.isnan(found.value).sum() == 1 and found.step[np.isnan(found.value)] == 500
    assert np.isnan(downsampled(curve([math.nan] * 100), 10).value).all()


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 10, 99, 100, 101])
def test_a_downsampled_curve_has_at_most_the_points_asked_for(count):
    for missing in (False, True):
        values = np.arange(100.0)
        if missing:
            values[50] = math.nan
        found = downsampled(curve(values), count)
        assert len(found.step) <= max(count, 5 if missing else 4)
        assert (found.step[0], found.step[-1]) == (0, 99)


def test_a_table_beyond_its_part_keeps_the_extremes(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.runs.record.curves._NEVER_THINNED", 100)
    values = np.zeros(5000)
    values[1234], values[4321] = 1, -1
    written(tmp_path, *((step, {"a": float(value)}) for step, value in enumerate(values)))
    table = table_of(tmp_path, most_bytes=24 * 3000 + 1024)
    found = points(table.curves(None)["a"])
    assert table.bytes < 24 * 3000 and (found[1234], found[4321]) == (1, -1)
    written(tmp_path, (5000, {"a": 7.0}), epoch=2)
    table.read_new()
    assert points(table.curves(None)["a"])[5000] == 7


def test_the_cache_holds_the_runs_read_last_within_its_bytes(tmp_path):
    for number in range(5):
        rows = ((step, {"a": 1.0}) for step in range(100))
        written(record_folder(tmp_path, f"s-{number}:train:0"), *rows)
    cache = CurveCache(tmp_path, most_bytes=8000)
    for number in (0, 1, 2, 3, 4, 0, 3):
        assert len(cache.curves(f"s-{number}:train:0", None)["a"].step) == 100
        assert cache.bytes <= 8000
    assert list(cache._tables) == ["s-0:train:0", "s-3:train:0"]


def test_a_run_without_a_record_has_no_curves(tmp_path):
    assert CurveCache(tmp_path).curves(RUN, None) == {}


def test_a_resumed_runs_curve_begins_with_its_parents_until_its_own_first_point():
    parent = {"a": curve(range(10)), "only": curve(range(10))}
    own = {"a": Curve(np.array([4, 5]), np.array([40.0, 50.0]), np.zeros(2)), "new": curve([1])}
    found = joined([(parent, 6), (own, None)])
    assert points(found["a"]) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 40, 5: 50}
    assert max(points(found["only"])) == 6 and points(found["new"]) == {0: 1}
    grand = joined([({"b": curve(range(4))}, 1), (parent, 6), (own, None)])
    assert points(grand["b"]) == {0: 0, 1: 1} and points(grand["a"]) == points(found["a"])


@pytest.mark.slow
def test_a_million_points_are_read_in_bounded_memory_and_then_at_once(tmp_path):
    folder = record_folder(tmp_path, RUN)
    writer = SegmentWriter(folder, "metrics", 1)
    for start in range(0, 10**6, 10**5):
        steps = range(start, start + 10**5)
        writer.append(b"".join(b'{"step":%d,"at":1.5,"values":{"a":%d}}\n' % (s, s) for s in steps))
    cache = CurveCache(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = cache.curves(RUN, None)["a"]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert len(found.step) == 10**6 and grown < 200 * 1024  # KiB
    started = time.process_time()
    writer.append(b'{"step":1000000,"at":1.5,"values":{"a":-1}}\n')
    found = downsampled(cache.curves(RUN, ["a"])["a"], 1000)
    again = time.process_time() - started
    assert found.value.min() == -1 and len(found.step) <= 1000
    print(f"the second reading took {again:.3f} s of CPU")
