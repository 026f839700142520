"""The disk keeps the newest and the used weights without a name."""

from __future__ import annotations

import pytest

from tests.support.files import entries
from tests.support.gateway.requests import asample, optim_step
from tests.support.gateway.running import running_gateway
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

STEPS, KEPT = 500, 4


def versions_of(gate, run_id: str) -> list[int]:
    folder = gate.settings.data_dir / "weights" / run_id.replace(":", "_")
    return sorted(int(child.name[1:7]) for child in entries(folder) if child.name[0] == "v")


def publish(client, run_id: str, seq_id: int) -> None:
    body = {"model_id": run_id, "seq_id": seq_id, "sampling_session_seq_id": seq_id}
    answer = client.post("/api/v1/save_weights_for_sampler", json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("model", ["tiny", "tiny:full"])
def test_five_hundred_steps_leave_as_many_versions_as_their_budget_has_room_for(tmp_path, model):
    limit = {"unnamed_bytes": 400}
    with running_gateway(tmp_path, session_ttl=600, limit=limit) as gate, gate.http() as client:
        run_id = gate.run_id(gate.session_id(), model=model)
        most = 0
        for step in range(STEPS):
            optim_step(client, run_id, 2 * step + 1)
            publish(client, run_id, 2 * step + 2)
            if step % 50 == 49:
                assert gate.retrieve(f"{run_id}:{2 * step + 2}").status_code == 200
                most = max(most, len(versions_of(gate, run_id)))
        newest = 2 * STEPS
        wait_until(lambda: len(versions_of(gate, run_id)) <= 20)
        assert len(versions_of(gate, run_id)) >= KEPT
        assert most < STEPS / 2, "they went while others came"
        sampler_id = f"{run_id.partition(':')[0]}:sample:{newest}"
        assert asample(client, sampler_id).status_code == 200, "the newest is served"
        trash = gate.settings.data_dir / "weights" / ".trash"
        wait_until(lambda: not entries(trash))


def test_the_least_recently_used_go_first_and_those_in_use_stay(tmp_path):
    with (
        running_gateway(tmp_path, session_ttl=600, sampler_newest_kept=1) as gate,
        gate.service() as service,
    ):
        run = service.create_lora_training_client("tiny").result()
        for _ in range(6):
            run.save_weights_and_get_sampling_client().result()
        sessions = gate.run(gate.gateway.sampling.all)
        by_number = {int(s.version.name.rpartition("/v")[2][:6]): s for s in sessions}
        size = by_number[1].version.bytes
        folder = f"weights/{by_number[2].version.name.replace(':', '_')}"

        def use() -> None:
            by_number[3].used_at += 100
            gate.gateway.pins.pin(folder)
            gate.settings.limit.unnamed_bytes = 3 * size

        gate.run(use)
        wait_until(lambda: versions_of(gate, run.model_id) == [2, 3, 6])


def test_one_owners_budget_is_not_anothers(tmp_path):
    limit = {"unnamed_bytes": 400}
    with running_gateway(tmp_path, session_ttl=600, limit=limit) as gate:
        with gate.http() as client:
            made = client.post("/api/tandem/v1/keys", json={"owner": "ann", "role": "member"})
        own, others = gate.session_id(), gate.session_id(made.json()["key"])
        with gate.http() as client:
            kept, many = gate.run_id(others), gate.run_id(own)
            for seq_id in range(1, 7):
                publish(client, kept, seq_id)
            for seq_id in range(1, 101):
                publish(client, many, seq_id)
            assert gate.retrieve(f"{many}:100").status_code == 200
        wait_until(lambda: len(versions_of(gate, many)) <= 20)
        assert len(versions_of(gate, kept)) == 6
