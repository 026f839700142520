"""A sampler is scaled over HTTP."""

from __future__ import annotations

import pytest

from gateway.owners.auth.keys import NewKey
from tests.support.gateway.running import running_gateway
from tests.support.waiting import wait_until

GROUPS = [
    {"name": "train", "devices": ["cpu:0"], "roles": ["trainer"]},
    *(
        {"name": f"s{n}", "devices": [f"cpu:{n}"], "roles": ["sampler"], "workers": 1}
        for n in (1, 2)
    ),
]
OWN = "/api/tandem/v1"


@pytest.fixture
def start(tmp_path):
    return lambda: running_gateway(tmp_path, groups=GROUPS, session_ttl=600)


def scale(gate, target: str, replicas: int, *, key: str = ""):
    client = gate.http(key) if key else gate.http()
    return client.put(f"{OWN}/samplers/{target}/replicas", json={"replicas": replicas})


def placed(gate) -> list[int]:
    """Engines with a place on each sampler group."""
    groups = gate.http().get(f"{OWN}/groups").json()["groups"]
    return [group["placed"] for group in groups if group["roles"] == ["sampler"]]


def test_what_a_run_was_scaled_to_outlives_the_gateway_until_its_session_ends(start):
    with start() as gate:
        session = gate.session_id()
        run = gate.run_id(session)
        assert placed(gate) == [1, 0]
        answer = scale(gate, run, 2).json()
        assert (answer["replicas"], answer["leaving"], placed(gate)) == (2, 0, [1, 1])
        wait_until(lambda: scale(gate, run, 2).json()["serving"] == 2)
        shown = gate.http().get(f"{OWN}/samplers/{run}").json()
        assert (shown["serving"], shown["sessions"], shown["kv_used"]) == (2, [session], 0.0)
        assert [each["replica"] for each in shown["engines"]] == [0, 1]
        (version,) = shown["versions"]
        assert version["state"] == "live" and version["name"].startswith("base/")
        refused = scale(gate, run, 3)
        assert refused.status_code == 400 and refused.json()["type"] == "invalid_request"
        assert "another engine of the same sampler is on group s1" in refused.json()["error"]
        told = gate.http().get(f"{OWN}/runs/{run}/steps").json()["engines"]
        assert told == {"replicas": 2, "serving": 2, "leaving": 0}
    with start() as gate:
        assert placed(gate) == [1, 1]
        assert scale(gate, run, 1).json()["replicas"] == 1
        wait_until(lambda: placed(gate) == [1, 0])
    with start() as gate:
        assert placed(gate) == [1, 0]
        gate.http().post(f"/api/v1/sessions/{session}/finish", json={"reason": {"type": "success"}})
        wait_until(lambda: placed(gate) == [0, 0])
        assert not gate.placed()


def test_a_range_is_set_at_once_and_a_number_ends_it(start):
    def put(target: str, **body):
        return gate.http().put(f"{OWN}/samplers/{target}/replicas", json=body)

    with start() as gate:
        run = gate.run_id(gate.session_id())
        answer = put(run, min=2, max=2).json()
        assert (answer["replicas"], answer["min"], answer["max"]) == (2, 2, 2)
        assert placed(gate) == [1, 1]
        answer = put(run, min=0, max=2).json()
        assert (answer["replicas"], answer["min"], answer["max"]) == (2, 0, 2)
        assert put(run, replicas=1).json()["max"] is None
        for wrong in ({}, {"replicas": 1, "max": 2}, {"min": 3, "max": 2}):
            refused = put(run, **wrong)
            assert (refused.status_code, refused.json()["type"]) == (400, "invalid_request")


def test_a_set_range_outlives_the_gateway_and_counts_before_the_metadata(start):
    def shown(target: str):
        about = gate.http().get(f"{OWN}/samplers/{target}").json()
        return about["replicas"], about["min"], about["max"]

    def put(target: str, **body):
        return gate.http().put(f"{OWN}/samplers/{target}/replicas", json=body)

    with start() as gate:
        run = gate.run_id(gate.session_id(), min_replicas="1", max_replicas="1")
        assert shown(run) == (1, 1, 1)
        put(run, min=0, max=2)
        assert shown(run) == (1, 0, 2)
    with start() as gate:
        assert shown(run) == (1, 0, 2)
        put(run, replicas=1)
    with start() as gate:
        assert shown(run) == (1, None, None)


def test_a_range_in_the_metadata_of_a_run_outlives_the_gateway(start):
    with start() as gate:
        run = gate.run_id(gate.session_id(), min_replicas="2", max_replicas="2")
    for _ in range(2):
        with start() as gate:
            shown = gate.http().get(f"{OWN}/samplers/{run}").json()
            assert (shown["min"], shown["max"]) == (2, 2)
            wait_until(lambda: placed(gate) == [1, 1])


def test_others_have_the_room_or_none_and_may_not_scale_what_is_not_theirs(start):
    with start() as gate:
        first, second = (gate.session_id() for _ in range(2))
        run = gate.run_id(first)
        gate.run_id(second)
        refused = scale(gate, run, 2).json()
        assert refused["type"] == "no_room"
        assert refused["error"].startswith(
            "1 more engine needs a place, and there is room for 0: 1st in the queue for a place on "
            "group s1 or s2: another engine of the same sampler is on group s1. Nothing has "
            "changed. Ask for fewer, wait for others to end"
        )
        key = gate.run(gate.gateway.keys.create(NewKey(owner="ben", role="member")))[1]
        assert scale(gate, run, 1, key=key).status_code == 404
        assert scale(gate, second, 2).json()["error"].startswith(f"session {second} has no sampler")
