"""Places that were passed: right for each place, and cheap for any distance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.runs.gaps import SequenceGaps


@given(
    filled=st.sets(st.integers(0, 40)),
    ends=st.lists(st.integers(1, 15), min_size=1, max_size=4),
    later=st.lists(st.integers(-2, 50), max_size=20),
)
def test_holes_are_the_set_of_places_that_nothing_filled(filled, ends, later):
    holes, expected, first = SequenceGaps(), set(), 0
    for size in ends:
        holes.add(first, first + size, filled=filled)
        expected |= set(range(first, first + size)) - filled
        first += size
    for place in later:
        assert holes.fill(place) == (place in expected)
        expected.discard(place)
    assert {place for place in range(-5, 70) if place in holes} == expected
