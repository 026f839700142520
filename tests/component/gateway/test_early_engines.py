"""Engines start beside their run's trainer if the owner's run before it needed them."""

from __future__ import annotations

from tests.support.gateway.running import running_gateway
from tests.support.waiting import wait_until

SHARED = [{"name": "gpu", "devices": ["cpu:0"], "roles": ["trainer", "sampler"]}]


def start_run(gate, *, sampled: bool = False) -> str:
    """Return the session of a new run, which may publish weights for its sampler."""
    session = gate.session_id()
    run_id = gate.run_id(session)
    if sampled:
        body = {"model_id": run_id, "seq_id": 1, "sampling_session_seq_id": 1}
        with gate.http() as client:
            client.post("/api/v1/save_weights_for_sampler", json=body)
        assert gate.retrieve(f"{run_id}:1").status_code == 200
    return session


def has_engine(gate, session: str) -> bool:
    return any(f"sampler-{session}" in each for each in gate.launcher.serving)


def test_the_engine_of_a_run_like_the_last_one_starts_before_its_first_save(tmp_path):
    with running_gateway(tmp_path) as gate:
        trains = start_run(gate)
        samples = start_run(gate, sampled=True)
        next_one = start_run(gate)
        wait_until(lambda: has_engine(gate, next_one))
        assert has_engine(gate, samples)
        assert not has_engine(gate, trains)


def test_no_engine_starts_early_after_a_run_that_only_trained(tmp_path):
    with running_gateway(tmp_path) as gate:
        start_run(gate, sampled=True)
        start_run(gate)
        session = start_run(gate)
        assert gate.gateway.samplers.get(session_id=session, model_name="tiny", rank=0) is None


def test_an_early_engine_takes_no_devices_from_its_trainer(tmp_path):
    with running_gateway(tmp_path, groups=SHARED) as gate:
        start_run(gate, sampled=True)
        session = start_run(gate)
        rows = gate.gateway.supervisor.roster.rows.values()
        states = {row.kind: row.state for row in rows if session in row.key}
        assert states == {"trainer": "awake", "engine": "placed"}
