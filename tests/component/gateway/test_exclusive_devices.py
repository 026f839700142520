"""Clients ask for devices that no other run shares (`tandem.sharing`)."""

from __future__ import annotations

import pytest

from tests.support.gateway.requests import create_run, finish, why_waiting
from tests.support.gateway.running import running_gateway
from tests.support.waiting import wait_until

TURNS = [{"name": "gpu", "devices": ["cpu:0"], "roles": ["trainer", "sampler"]}]
APART = [{"name": "own", "devices": ["cpu:1"], "roles": ["trainer", "sampler"]}]


@pytest.fixture
def start(tmp_path):
    """Start a gateway on the same directory with these groups."""

    def started(**changes):
        return running_gateway(tmp_path, **({"groups": TURNS, "session_ttl": 600} | changes))

    return started


def test_an_exclusive_run_is_alone_on_its_group_also_after_a_restart(start):
    with start() as gate, gate.http() as client:
        first, second = gate.session_id(), gate.session_id()
        told = create_run(client, first, sharing="exclusive").json()
        gate.retrieve(told["request_id"])
        assert {spec.sharing for spec in gate.launcher.specs} == {"exclusive"}
        waiting = create_run(client, second).json()["request_id"]
        wait_until(gate.waiting_for_places)
        alone = "a run has group gpu to itself (tandem.sharing exclusive)"
        assert alone in why_waiting(client, waiting)
        there = gate.placed()
        assert len(there) == 2 and all(key.startswith(first) for key in there)
    with start() as gate, gate.http() as client:
        assert gate.placed() == there
        for session in (first, second):
            client.post("/api/v1/session_heartbeat", json={"session_id": session})
        wait_until(gate.waiting_for_places)
        assert alone in why_waiting(client, waiting)
        finish(client, first)
        assert gate.retrieve(waiting).status_code == 200
        assert all(key.startswith(second) for key in gate.placed())


def test_two_exclusive_runs_of_one_session_have_groups_and_engines_of_their_own(start):
    with start(groups=TURNS + APART) as gate, gate.http() as client:
        session = gate.session_id()
        for number, group in enumerate(("gpu", "own")):
            where = {"group": group, "sampler_group": group}
            told = create_run(client, session, number, sharing="exclusive", **where).json()
            assert gate.retrieve(told["request_id"]).status_code == 200
        there = gate.placed()
        trainers = [f"{session}:train:{number}" for number in range(2)]
        engines = [f"{session}/tiny/0", f"{session}/tiny/0.1"]
        for trainer, engine in zip(trainers, engines, strict=True):
            assert there.pop(trainer) == there.pop(engine)
        assert there == {}
        third = create_run(client, session, 2).json()["request_id"]
        wait_until(gate.waiting_for_places)
        assert "another worker of this session has group" in why_waiting(client, third)


def test_a_way_to_share_that_no_group_offers_is_refused(start):
    with start() as gate, gate.http() as client:
        refused = create_run(client, gate.session_id(), sharing="mps")
        assert refused.status_code == 400
        told = refused.json()
        assert told["type"] == "invalid_request"
        assert "known: exclusive, time_slice" in told["error"]
        (group,) = client.get("/api/tandem/v1/groups").json()["groups"]
        assert group["sharing"] == "time_slice"


def test_each_run_is_alone_on_a_group_that_is_declared_exclusive(start):
    with start(groups=[TURNS[0] | {"sharing": "exclusive"}]) as gate, gate.http() as client:
        session = gate.session_id()
        run = create_run(client, session).json()
        gate.retrieve(run["request_id"])
        waiting = create_run(client, session, 1).json()["request_id"]
        wait_until(gate.waiting_for_places)
        assert "another worker of this session has group" in why_waiting(client, waiting)
        assert set(gate.placed()) == {run["model_id"], f"{session}/tiny/0"}
