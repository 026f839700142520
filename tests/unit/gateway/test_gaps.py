"""Places that were passed: right for each place, and cheap for any distance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.runs.gaps import SequenceGaps
from tests.support.gateway.running import running_gateway


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


def test_a_place_far_ahead_costs_nothing_and_the_gateway_goes_on(tmp_path):
    with running_gateway(tmp_path, sequence_gap_timeout=0.05) as gate, gate.http() as client:
        run_id = gate.run_id(gate.session_id())
        far = {"model_id": run_id, "seq_id": 2**53, "adam_params": {}}
        answer = client.post("/api/v1/optim_step", json=far)
        assert "sequence_gap" in gate.retrieve(answer.json()["request_id"]).json()["error"]
        late = {"model_id": run_id, "seq_id": 2**40, "adam_params": {}}
        answer = client.post("/api/v1/optim_step", json=late)
        assert "sequence_gap" in gate.retrieve(answer.json()["request_id"]).json()["error"]
        assert client.get("/api/v1/healthz").status_code == 200
