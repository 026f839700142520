"""Bodies that are good JSON and not what they seem."""

from __future__ import annotations

import json

import pytest

from tests.support.gateway.running import KEY


def saved_run(gate, client) -> tuple[str, str]:
    """A session, and the path of a checkpoint in it."""
    session_id = gate.session_id()
    run_id = gate.run_id(session_id)
    saving = {"model_id": run_id, "seq_id": 1, "path": "kept"}
    gate.retrieve(client.post("/api/v1/save_weights", json=saving).json()["request_id"])
    return session_id, f"tinker://{run_id}/weights/kept"


@pytest.mark.parametrize(
    "field",
    [
        f'"weights_access_token": "{KEY}"',
        f'"weights_access\\u005ftoken": "{KEY}"',
        f'"weights_access_token": "{KEY}", "weights_access_token": null',
    ],
)
def test_a_token_that_was_lent_is_not_kept_however_its_field_is_written(gate, field):
    with gate.http() as client:
        session_id, path = saved_run(gate, client)
        body = f'{{"session_id": "{session_id}", "model_seq_id": 1, "path": "{path}", "n": NaN, '
        answer = client.post("/api/v1/load_weights", content=f"{body}{field}}}")
        assert answer.status_code == 200, answer.text
        assert gate.retrieve(answer.json()["request_id"]).json()["type"] == "load_weights"
    gate.run(gate.gateway.database.flush())
    kept = b"".join(p.read_bytes() for p in gate.settings.data_dir.glob("tandem.db*"))
    assert path.encode() in kept
    assert KEY.encode() not in kept


def test_metadata_of_any_json_is_kept_as_text(gate):
    odd = {"n": 10**30, "deep": [[{"a": "é"}]], "text": "é"}
    with gate.http() as client:
        made = client.post("/api/v1/create_session", content=json.dumps({"user_metadata": odd}))
        assert made.status_code == 200, made.text
        session = client.get(f"/api/v1/sessions/{made.json()['session_id']}").json()
    assert session["user_metadata"] == {
        "n": "1" + "0" * 30,
        "deep": '[[{"a":"é"}]]',
        "text": "é",
    }


@pytest.mark.parametrize("number", ["9999999999999999999", "²", "٣", "-1", "1_0"])
def test_a_request_that_cannot_be_is_unknown(gate, number):
    with gate.http() as client:
        session_id = gate.session_id()
        for kind in ("train", "sample"):
            asked = {"request_id": f"{session_id}:{kind}:0:{number}"}
            answer = client.post("/api/v1/retrieve_future", json=asked)
            assert (answer.status_code, answer.json()["type"]) == (404, "unknown_request")


def test_a_sentence_does_not_repeat_megabytes(gate):
    with gate.http() as client:
        answer = client.post("/api/v1/session_heartbeat", json={"session_id": "x" * 2**20})
        assert answer.status_code == 404
        assert len(answer.content) < 5000


@pytest.mark.parametrize("day", ["0", "20260701", "1782864000", "2026-13-01", ""])
def test_a_day_is_written_out(gate, day):
    with gate.http() as client:
        answer = client.get("/api/v1/audit", params={"day": day})
        assert (answer.status_code, answer.json()["type"]) == (400, "invalid_request")
