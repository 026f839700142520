from __future__ import annotations

from scripts.example_bounds import broken_bounds, tighter


def test_new_values_never_loosen_a_bound():
    known = {"gain": {"at_least": 0.3}, "loss": {"at_most": 0.2}}
    assert tighter(known, {"gain": {"at_least": 0.1}, "loss": {"at_most": 0.5}}) == known
    better = {"gain": {"at_least": 0.4}, "loss": {"at_most": 0.1}}
    assert tighter(known, better) == better


def test_an_example_without_bounds_gets_the_measured_ones():
    assert tighter({}, {"gain": {"at_least": 0.1}}) == {"gain": {"at_least": 0.1}}


def test_a_number_beyond_its_bound_is_named():
    bounds = {"gain": {"at_least": 0.3}, "oldest": {"at_most": 2.0}}
    assert broken_bounds(bounds, {"gain": 0.3, "oldest": 3.0}) == ["oldest"]
