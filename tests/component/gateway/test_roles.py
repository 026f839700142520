"""The roles of maintainers and of CI. The table of all routes is in test_access_table.py."""

from __future__ import annotations

import pytest

from gateway.owners.auth.keys import NewKey, Role
from tests.support.gateway.access_world import BLUEPRINT

API, OWN = "/api/v1", "/api/tandem/v1"


def key_of(gate, role: Role, owner: str) -> str:
    return gate.run(gate.gateway.keys.create(NewKey(owner=owner, role=role)))[1]


@pytest.fixture
def ci(gate):
    with gate.http(key_of(gate, "ci", "ann")) as client:
        yield client


@pytest.fixture
def member(gate):
    """A member of the owner of the CI key."""
    with gate.http(key_of(gate, "member", "ann")) as client:
        yield client


def begin(client, metadata=None):
    body = {"tags": [], "sdk_version": "test", "user_metadata": metadata}
    return client.post(f"{API}/create_session", json=body)


def new_run(client, session: str, **fields):
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny:full", **fields}
    return client.post(f"{API}/create_model", json=body)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"tandem.deadline": "3600"},
        {"tandem.blueprint": "sft-chat"},
        {"tandem.blueprint": "", "tandem.deadline": "3600"},
        {"tandem.blueprint": "sft-chat", "tandem.deadline": "86401"},
        {"tandem.blueprint": "sft-chat", "tandem.deadline": "2100-01-01T00:00:00Z"},
    ],
)
def test_a_session_of_ci_names_a_blueprint_and_ends_within_a_day(ci, metadata):
    refused = begin(ci, metadata)
    assert refused.status_code == 403
    assert "has tandem.blueprint, and a tandem.deadline of at most" in refused.json()["error"]


def test_ci_works_in_its_sessions_of_blueprints(ci):
    session = begin(ci, BLUEPRINT).json()["session_id"]
    run = new_run(ci, session).json()["model_id"]
    assert ci.patch(f"{OWN}/runs/{run}", json={"tags": ["blueprint:sft-chat"]}).status_code == 200
    finish = {"reason": {"type": "success"}}
    assert ci.post(f"{API}/sessions/{session}/finish", json=finish).status_code == 204
    rows = {"rows": [{"step": 1, "values": {"reward": 0.5}}]}
    assert ci.post(f"{OWN}/runs/{run}/metrics", json=rows).status_code == 200, "after the end, too"


def test_a_run_of_ci_cannot_outlive_the_deadline_of_its_session(ci):
    session = begin(ci, BLUEPRINT).json()["session_id"]
    refused = new_run(ci, session, user_metadata={"tandem.deadline": "1000000"})
    assert refused.status_code == 403
    assert "has the tandem.deadline of its session" in refused.json()["error"]


def test_ci_sees_other_work_of_its_owner_and_cannot_change_it(ci, member):
    session = begin(member).json()["session_id"]
    run = new_run(member, session).json()["model_id"]
    assert ci.get(f"{OWN}/runs/{run}").status_code == 200
    finish = {"reason": {"type": "success"}}
    answers = [
        new_run(ci, session),
        ci.post(f"{API}/session_heartbeat", json={"session_id": session}),
        ci.post(f"{API}/sessions/{session}/finish", json=finish),
        ci.patch(f"{OWN}/runs/{run}", json={"name": "mine"}),
        ci.post(f"{OWN}/runs/{run}/metrics", json={"rows": []}),
        ci.post(f"{API}/cancel_future", json={"request_id": f"{run}:0"}),
    ]
    assert [answer.status_code for answer in answers] == [403] * len(answers)
    assert all("sessions of blueprints only" in answer.json()["error"] for answer in answers)


def test_ci_has_no_samples_outside_a_session(ci):
    sample = {
        "base_model": "tiny",
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
    }
    scores = {"model": "tiny", "sequences": [[1, 2]]}
    for path, body in ((f"{API}/asample", sample), (f"{OWN}/logprobs", scores)):
        refused = ci.post(path, json=body)
        assert refused.status_code == 403, refused.text
        assert "sessions of blueprints only" in refused.json()["error"]


def test_a_maintainer_sees_and_stops_the_runs_of_others_and_changes_none(gate, member):
    session = begin(member).json()["session_id"]
    run = new_run(member, session).json()["model_id"]
    with gate.http(key_of(gate, "maintainer", "max")) as maintainer:
        assert run in [each["id"] for each in maintainer.get(f"{OWN}/runs").json()["runs"]]
        status = maintainer.get(f"{OWN}/status").json()
        assert session in [each["id"] for each in status["sessions"]]
        assert (status["gateway"]["data_dir"], status["gateway"]["pid"]) == ("", 0)
        assert maintainer.patch(f"{OWN}/runs/{run}", json={"name": "mine"}).status_code == 404
        seen_at = gate.run(lambda: gate.gateway.sessions.get(session).seen_at)
        assert maintainer.get(f"{OWN}/logs?request={run}:0").status_code == 200
        assert gate.run(lambda: gate.gateway.sessions.get(session).seen_at) == seen_at
        assert maintainer.delete(f"{OWN}/keys/k-0").status_code == 403
        assert maintainer.patch(f"{OWN}/owners/ann", json={"runs": 1}).status_code == 403
        stopped = maintainer.post(f"{OWN}/runs/{run}/stop", json={"discard": True})
        assert stopped.status_code == 200
    assert member.get(f"{OWN}/runs/{run}").json()["reason"] == "max has stopped the run"


def test_a_maintainer_ends_a_session_of_another_owner(gate, member):
    session = begin(member).json()["session_id"]
    with gate.http(key_of(gate, "maintainer", "max")) as maintainer:
        finish = {"reason": {"type": "interrupted"}}
        answer = maintainer.post(f"{API}/sessions/{session}/finish", json=finish)
        assert answer.status_code == 204
    beat = member.post(f"{API}/session_heartbeat", json={"session_id": session})
    assert beat.status_code == 410
