"""Old databases, and questions about removed rows."""

from __future__ import annotations

from sqlalchemy import update

from gateway.storage.tables import metadata
from tests.support.gateway.requests import finish, optim_step
from tests.support.gateway.running import running_gateway
from tests.support.waiting import wait_until


def test_what_ended_long_ago_is_gone_after_a_start_and_a_saved_state_still_loads(tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        gone, kept = gate.session_id(), gate.session_id()
        runs = [gate.run_id(session) for session in (gone, kept)]
        requests = [optim_step(client, run, 1).json()["request_id"] for run in runs]
        save = {"model_id": runs[1], "seq_id": 2, "path": "kept"}
        saved = client.post("/api/v1/save_weights", json=save).json()["request_id"]
        path = gate.retrieve(saved).json()["path"]
        for session, request in zip((gone, kept), requests, strict=True):
            gate.retrieve(request)
            finish(client, session)
        for name in ("operations", "runs", "sessions"):
            table = metadata.tables[name]
            gate.run(gate.gateway.database.write(update(table).values(ended_at=1.0)))

    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        sessions = "/api/v1/sessions?access_scope=accessible"
        wait_until(lambda: gone not in client.get(sessions).text)
        assert kept in client.get(sessions).text
        for request in requests:
            answer = client.post("/api/v1/retrieve_future", json={"request_id": request})
            assert answer.status_code == 404
            assert answer.json()["error"].startswith("there is no request")
        with gate.service() as service:
            service.create_training_client_from_state(path).result()
