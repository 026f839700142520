from __future__ import annotations

from tests.support.gateway.running import running_gateway


def test_a_seq_id_far_ahead_costs_nothing_and_the_gateway_goes_on(tmp_path):
    with running_gateway(tmp_path, sequence_gap_timeout=0.05) as gate, gate.http() as client:
        run_id = gate.run_id(gate.session_id())
        far = {"model_id": run_id, "seq_id": 2**53, "adam_params": {}}
        answer = client.post("/api/v1/optim_step", json=far)
        assert "sequence_gap" in gate.retrieve(answer.json()["request_id"]).json()["error"]
        late = {"model_id": run_id, "seq_id": 2**40, "adam_params": {}}
        answer = client.post("/api/v1/optim_step", json=late)
        assert "sequence_gap" in gate.retrieve(answer.json()["request_id"]).json()["error"]
        gate.gateway.futures._futures.clear()  # the journal remembers both
        for body in (far, late):
            again = client.post("/api/v1/optim_step", json=body)
            assert "sequence_gap" in gate.retrieve(again.json()["request_id"]).json()["error"]
        assert client.get("/api/v1/healthz").status_code == 200
